"""Parallel: the interface between the one training loop (loop.py) and all kinds of parallelism.

The loop asks it for everything that depends on other processes. Each kind of parallelism overrides
only what differs:

    class             lab  in                             what differs
    Parallel               here                           nothing: one process
    GroupParallel          here                           sums over the ranks of a group
    DataParallel      03   data_parallel/training.py      each rank has its rows; gradients averaged
    Zero              06   zero/training.py               DataParallel; each rank steps its shard
    FullyShard        07   fsdp/training.py               DataParallel; each rank holds its shard
    TensorParallel    08   tensor_parallel/training.py    each rank has all rows, part of each layer
    PipelineParallel  09   pipeline_parallel/training.py  some layers; a schedule runs micro-batches
    ContextParallel   10   context_parallel/training.py   DataParallel; each rank has some tokens
    ExpertParallel    11   expert_parallel/training.py    DataParallel; each rank has some experts
    Hybrid            12   hybrid/training.py             all of these on one mesh

Projects use production tools through the same interface: HorovodParallel (05), DeepSpeed (06),
Fsdp2 (07), DTensors (08), TorchHybrid (12).

A loss is always a sum over targets, divided by the number of targets in the whole batch: the mean
of the ranks' means differs from it as soon as one rank has more targets than another.
"""

import contextlib
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ranklab.basics.targets import IGNORE


class Piece(NamedTuple):
    """A box of one named tensor that this process holds: a checkpoint reads and writes `tensor`."""

    name: str  # of the parameter or buffer
    kind: str  # "weight", or the optimizer's name for its state: "exp_avg", "step", ...
    shape: tuple  # of the whole tensor, as one process would hold it
    offset: tuple  # where the box begins in it
    tensor: torch.Tensor  # the box itself, a view of what is trained


def flat_pieces(name, kind, shape, start, flat):
    """Cut `flat`, the numbers of a flattened tensor from `start` on, into a few Pieces.

    The Pieces are boxes, and views of `flat`. So a shard of ZeRO can be loaded as a shard of tensor
    parallelism, and vice versa.
    """
    pieces, position = [], 0
    for offset, sizes in _boxes(tuple(shape), start, start + flat.numel()):
        n = math.prod(sizes)
        box = flat[position : position + n].view(sizes)
        pieces.append(Piece(name, kind, tuple(shape), offset, box))
        position += n
    return pieces


def _boxes(shape, start, stop):
    """List (offset, sizes) of the boxes with numbers start to stop of a flattened tensor, in order.
    """
    if start >= stop or not shape:
        return [((), ())] if start < stop else []
    rest, row = shape[1:], math.prod(shape[1:])
    first = start // row
    if start % row == stop % row == 0:  # whole rows
        return [((first, *(0 for _ in rest)), ((stop - start) // row, *rest))]
    if first == (stop - 1) // row:  # inside one row
        inner = _boxes(rest, start - first * row, stop - first * row)
        return [((first, *offset), (1, *sizes)) for offset, sizes in inner]
    middle = (first + 1) * row if start % row else stop // row * row
    return _boxes(shape, start, middle) + _boxes(shape, middle, stop)


class Parallel:
    """Train in one process, with the whole model and the whole batch; the base of all kinds."""

    rank, ranks = 0, 1  # rank 0 shows the progress
    gradient_scale = 1  # factor on the loss: R if backward averages over ranks but sums are wanted

    def apply(self, model):
        """Return the module that the loop calls instead of `model`; `model` may change in place."""
        return model

    def batch(self, inputs, targets):
        """Return this process's part of the batch, which is the same on all ranks."""
        return inputs, targets

    def token_count(self, targets):
        """Count all valid targets in the whole batch; `targets` are this process's."""
        return (targets != IGNORE).sum()

    def forward_backward(self, loss_sum, inputs, targets, micro_batch, scale=1.0):
        """Compute the gradients of the mean loss over the whole batch, times `scale`.

        loss_sum: (inputs, targets) -> the sum of the losses of the targets that count.
        Returns: this process's share of that mean, detached (`total` of the shares is the mean).
        """
        count = self.token_count(targets).clamp(min=1)  # a batch without targets teaches nothing
        pieces = list(zip(inputs.split(micro_batch), targets.split(micro_batch)))
        share = 0.0
        for i, (x, y) in enumerate(pieces, 1):
            with self.communication(is_last=i == len(pieces)):
                loss = loss_sum(x, y) / count
                self.backward(loss * (self.gradient_scale * scale))
            share = share + loss.detach()
        return share

    def forward_only(self, loss_sum, inputs, targets, micro_batch):
        """Compute this process's share of the sum of the losses; for evaluation."""
        pieces = zip(inputs.split(micro_batch), targets.split(micro_batch))
        return sum(loss_sum(x, y) for x, y in pieces)

    def backward(self, loss):
        """Add the gradients of `loss` to .grad; DeepSpeed has its own way."""
        loss.backward()

    def communication(self, is_last):
        """Return a context for a piece's forward and backward: ranks talk only in the last piece's.
        """
        return contextlib.nullcontext()

    def grad_norm(self, parameters):
        """Return the norm of all gradients of the whole model, the same on all ranks.

        Each parameter counts once. If one rank's norm is not finite, no rank's is, so that either
        all ranks skip the step or none does.
        """
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def make_optimizer(self, new_optimizer, groups):
        """Make new_optimizer(groups), or an optimizer that steps a part of the groups on each rank.

        groups: of (name, parameter), with their weight_decay, decided before anything is sharded.
        """
        return new_optimizer(groups)

    def total(self, value):
        """Sum a tensor over ranks, without a gradient."""
        return value

    def total_of(self, shares):
        """Sum the gathered shares of all ranks, as `total` does: [rank 0's, rank 1's, ...]."""
        return sum(shares)

    def gather(self, values):
        """Gather the tensors of all ranks on every rank, for the log: (n,) -> (R, n)."""
        return values[None]

    def state(self, model, optimizer):
        """List the Pieces that this process holds of the model and of the optimizer's state.

        If several processes hold the same box, a checkpoint takes it from the first of them.
        """
        names = {p: name for name, p in model.named_parameters()}  # a tied matrix has one name
        tensors = [(name, "weight", tensor) for name, tensor in
                 model.state_dict(keep_vars=True).items() if names.get(tensor, name) == name]
        tensors += [(names[p], kind, value) for group in optimizer.param_groups
                  for p in group["params"] for kind, value in optimizer.state.get(p, {}).items()
                  if p in names and torch.is_tensor(value)]
        return [Piece(name, kind, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())
                for name, kind, tensor in tensors]

    def loaded(self):
        """Update everything derived from the Pieces, once they are filled from a checkpoint."""

    def rank_state(self, model):
        """Return {name: state} that differs between ranks, such as compressed gradients' errors.

        A checkpoint restores it only for the same number of ranks.
        """
        return {}

    def load_rank_state(self, model, state):
        """Restore what rank_state returned."""


class GroupParallel(Parallel):
    """Sum and gather over the ranks of a group; the base class of all kinds of parallelism."""

    def __init__(self, group=None):
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def total(self, value):
        value = torch.as_tensor(value).clone()
        dist.all_reduce(value, group=self.group)
        return value

    def gather(self, values):
        gathered = values.new_empty(self.ranks * len(values))
        dist.all_gather_single(gathered, values, group=self.group)
        return gathered.view(self.ranks, -1)


def groups_here(groups, find):
    """Reduce an optimizer's groups, decided for the whole model, to this rank's parameters.

    A group with nothing on this rank gets an empty parameter of its own: torch refuses a group
    without parameters next to a group with named ones, and the same parameter in two groups.
    find: (name, parameter of the whole model) -> this rank's parameter, or None.
    """
    local_groups = [[(name, local) for name, p in group["params"]
                     if (local := find(name, p)) is not None] for group in groups]
    like = next((local for pairs in local_groups for _, local in pairs), torch.empty(0))
    return [{**group, "params": pairs or [("nothing", nn.Parameter(like.new_empty(0)))]}
            for group, pairs in zip(groups, local_groups)]
