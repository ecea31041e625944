"""Zero: ZeRO behind the training loop's interface, a DataParallel (data_parallel) in shards."""

import contextlib

import torch

from ranklab.data_parallel.training import DataParallel
from ranklab.trainer.parallel import Piece, flat_pieces
from ranklab.zero.offload import CpuMemory, Files, offload_optimizer
from ranklab.zero.stage3 import ZeroStage3
from ranklab.zero.stages import ZeroStage1, ZeroStage2

STAGES = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}


class Zero(DataParallel):
    """Train with data parallelism in which each rank holds 1/R of some states.

    Each stage shards more states: see the picture in the package's docstring.
    stages: the class for each stage; it may be a learner's own.
    offload: None, "cpu", or a folder for the optimizer's state.
    Lab: 06
    """

    def __init__(self, stage, group=None, equal_parts=False, offload=None, stages=STAGES):
        super().__init__(group, stages[stage], equal_parts)
        self.stage, self.offload, self.each_piece_talks = stage, offload, stage > 1

    def make_optimizer(self, new_optimizer, groups):
        if self.offload is None:
            return self.replica.make_optimizer(new_optimizer, groups)
        place = CpuMemory() if self.offload == "cpu" else Files(self.offload)
        return offload_optimizer(self.replica, new_optimizer, groups, place)

    def gradients(self, model):
        """List the gradients of this rank's parts, without parameters that no rank has used."""
        return [(part.parameter, part.master.grad, 1) for bucket in self.replica.buckets
                for part in bucket.parts if part.master.grad is not None]

    def communication(self, is_last):
        """Send the gradients of each piece from stage 2 on; else each rank would keep all of them.
        """
        return super().communication(is_last) if self.stage == 1 else contextlib.nullcontext()

    def grad_norm(self, parameters):
        """Return the norm: squares are summed over ranks, because each number is on one rank."""
        norm = super().grad_norm(parameters)
        device = self.replica.buckets[0].shard.device
        return self.total(norm.to(device).double().square()).sqrt().float().to(norm.device)

    def state(self, model, optimizer):
        """List the Pieces that this rank owns, in the optimizer's precision, and unsharded ones."""
        names = {p: name for name, p in model.named_parameters()}
        parts = [part for bucket in self.replica.buckets for part in bucket.parts]
        sharded = {names[p] for bucket in self.replica.buckets for p in bucket.parameters}
        pieces = [piece for piece in super().state(model, optimizer) if piece.name not in sharded]
        for parameter, start, _, master in parts:
            tensors = {"weight": master.detach(), **optimizer.state.get(master, {})}
            for kind, value in tensors.items():
                if torch.is_tensor(value) and value.dim():
                    pieces += flat_pieces(names[parameter], kind, parameter.shape, start, value)
                elif torch.is_tensor(value):  # Adam's step
                    pieces.append(Piece(names[parameter], kind, (), (), value))
        return pieces

    def loaded(self):
        self.replica.step_ends()
