"""FullyShard: FSDP behind the training loop's interface, a DataParallel (data_parallel) in rows."""

import math

import torch

from ranklab.data_parallel.training import DataParallel
from ranklab.fsdp.block import FullyShardedBlock
from ranklab.fsdp.clip import clip_grad_norm_sharded
from ranklab.fsdp.shards import sharded_parameters
from ranklab.trainer.parallel import Parallel, groups_here


class FullyShard(DataParallel):
    """Train with data parallelism in which each rank keeps some rows of every parameter.

    groups: (shards, replicas) of hybrid_shard_groups; None: the group shards one copy.
    blocks: (model) -> the modules to shard one by one; None: the model's `blocks`.
    block: the class that shards them, and then the model; it may be a learner's own.
    clip: the function that returns the norm of sharded gradients; it may be a learner's own.
    options: for FullyShardedBlock: precision, reshard_after_forward, offload.
    Lab: 07
    """

    # The gradients of each piece are sent, or else they would stay whole on each rank.
    each_piece_talks, communication = True, Parallel.communication

    def __init__(self, group=None, groups=None, blocks=None, block=FullyShardedBlock,
                 clip=clip_grad_norm_sharded, **options):  # fmt: skip
        super().__init__(group, None)
        self.shards, self.replicas = groups or (group, None)
        self.blocks, self.block, self.norm_of, self.options = blocks, block, clip, options

    def apply(self, model):
        """Turn the model's parameters into this rank's rows; return the model."""
        blocks = self.blocks(model) if self.blocks else model.blocks.values()
        for module in (*blocks, model):
            self.block(module, self.shards, self.replicas, **self.options)
        self.rows, self.sharded = dict(model.named_parameters()), sharded_parameters(model)
        return model

    def make_optimizer(self, new_optimizer, groups):
        # a missing name is already in rows: a part of a model may use a different name
        return new_optimizer(groups_here(groups, lambda name, p: self.rows.get(name, p)))

    def reduce_now(self):
        """Do nothing: each piece's gradients have already been reduced."""

    def gradients(self, model):
        """List the gradients of this rank's rows."""
        return [(rows, rows.grad, 1) for rows in model.parameters() if rows.grad is not None]

    def grad_norm(self, parameters):
        norm = self.norm_of(parameters, math.inf, self.shards)
        # A learner's norm may be a number. Offloaded gradients are where their rows are.
        return torch.as_tensor(norm, device=parameters[0].device)

    def state(self, model, optimizer):
        """List this rank's rows, and the state that is not in rows."""
        pieces = [self.placed(piece) for piece in Parallel.state(self, model, optimizer)]
        return [piece for piece in pieces if piece.tensor.numel()]

    def placed(self, piece):
        """Return `piece` with the offset of this rank's rows in the whole parameter."""
        if not (placement := self.rows_in(piece)):
            return piece
        shape, first, rows = placement
        offset = (first,) + (0,) * (rows.dim() - 1)
        return piece._replace(shape=tuple(shape), offset=offset, tensor=rows)

    def rows_in(self, piece):
        """Return (whole shape, index of this rank's first row, the rows); None if not in rows."""
        parameter = self.sharded.get(self.rows.get(piece.name))
        if parameter is not None and piece.tensor.dim():
            return parameter.shape, parameter.first, piece.tensor
