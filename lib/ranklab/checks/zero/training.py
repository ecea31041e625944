"""A training run on every rank, and the same run in one process: it checks all three stages."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.prover import Must
from ranklab.checks.zero.toys import ADAMW, SGD, Toy, is_there, loss_of, loss_on, seeded
from ranklab.basics.flat import pack, pieces, unpack
from ranklab.data_parallel.buckets import buckets_of
from ranklab.zero.partition import ShardedBucket
from ranklab.zero.sharded_model import units_of

FREED = "gradients of the optimizer in memory that was freed"


class Run(NamedTuple):
    """A training run.

    new_model  kind of checkpoint -> a model
    pieces     of each backward before a step, whether it communicates
    options    of the wrapped model
    recompute  the kind of checkpoint around the blocks
    """

    what: str
    new_model: Callable
    new_optimizer: Callable
    pieces: tuple = (True,)
    steps: int = 1
    options: dict = {}
    recompute: str | None = None

    def __str__(self):
        checkpoint = f", in {self.recompute} checkpoints" if self.recompute else ""
        return f"{self.what}{checkpoint}"


def _in_bfloat16(recompute):
    return Toy(recompute).bfloat16()


RUNS = (
    Run("AdamW", Toy, ADAMW),
    Run("SGD, sync=False in the first of two backwards", Toy, SGD, (False, True)),
    Run("SGD, a block used twice, three backwards in each of two steps",
        partial(Toy, order=(0, 1, 2, 3, 0)), SGD, (False, True, True), 2),
    Run("in bfloat16", _in_bfloat16, partial(torch.optim.SGD, lr=10)),
)
EXPERTS = Run("blocks that not all ranks use", partial(Toy, order=None), ADAMW, steps=2,
              options={"find_unused_parameters": True})


def see_training(new, run, ranks, new_watch,
                 make_optimizer=lambda wrapped, new: wrapped.make_optimizer(new),
                 see_optimizer=lambda wrapped, optimizer: {}):
    """Yield the observations of each backward, each step and a forward without gradients.

    new             (module, **options) -> the wrapped model
    new_watch       a Watch (toys.py)
    make_optimizer  (wrapped, new_optimizer); the model's own by default
    see_optimizer   (wrapped, optimizer) -> what they show before the first step
    Returns: the wrapped model and its optimizer.
    """
    rank = dist.get_rank()  # each begins with other weights: those of the group's first rank count
    wrapped = new(seeded(lambda: run.new_model(run.recompute), rank), **run.options,
                  **ranks.keywords)
    optimizer = make_optimizer(wrapped, run.new_optimizer)
    yield see_optimizer(wrapped, optimizer)
    for step in range(run.steps):
        optimizer.zero_grad()
        for piece, wrapped.sync in enumerate(run.pieces):
            with new_watch(wrapped) as watch:
                loss = loss_of(wrapped, 100 * step + 10 * piece + rank)
                watch.forward_ends()
                loss.backward()
            yield {"the loss": loss} | watch.of_forward() | watch.of_backward() | (
                _gradients(wrapped) if wrapped.sync else {})
        with new_watch(wrapped) as watch:
            optimizer.step()
        weights = {f"`{name}`": weight for name, weight in wrapped.state_dict().items()}
        yield watch.of_step() | weights
    wrapped.eval()
    with torch.no_grad(), new_watch(wrapped) as watch:
        loss = loss_of(wrapped, 0)
        watch.forward_ends()
    yield {"the loss in eval()": loss} | watch.of_forward()
    return wrapped, optimizer


def _gradients(wrapped):
    """Return copies of the optimizer's gradients on this rank, in the parameters' type: it owns a
    part of each. (Nothing here keeps their memory.)
    """
    names = {parameter: name for name, parameter in wrapped.module.named_parameters()}
    gradients, freed = {}, []
    for part in (part for bucket in wrapped.buckets for part in bucket.parts):
        name, gradient = names[part.parameter], part.master.grad
        if gradient is not None and not is_there(gradient):
            freed.append(name)
            gradient = None
        gradients[f"the optimizer's gradient of `{name}`"] = (
            None if gradient is None else gradient.to(part.parameter.dtype, copy=True))
    return {FREED: Must(freed, [])} | gradients


class OneProcess:
    """A model in one process, with masters in float32 or better."""

    def __init__(self, model, new_optimizer):
        self.model, self.trained = model, [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
                        for p in self.trained]
        self.optimizer = new_optimizer(self.masters)

    def gradients_of(self, tokens):
        """Return the gradients as one flat float64 tensor; at its end, for each parameter, 1 if it
        is used, 0 if not.
        """
        gradients = torch.autograd.grad(loss_on(self.model, tokens), self.trained,
                                        allow_unused=True)
        used = torch.tensor([gradient is not None for gradient in gradients], device=tokens.device)
        return pack([*(torch.zeros_like(p) if gradient is None else gradient
                       for p, gradient in zip(self.trained, gradients)), used.double()])

    def set_gradients(self, flat):
        """Return {parameter: gradient}, which become its master's; None where none has used it."""
        *gradients, used = pieces(flat, [*self.masters, flat[-len(self.masters):]])
        for master, gradient, is_used in zip(self.masters, gradients, used):
            master.grad = gradient.to(master.dtype) if is_used else None
        return {p: master.grad for p, master in zip(self.trained, self.masters)}

    def copy_masters(self):
        for p, master in zip(self.trained, self.masters):
            p.data.copy_(master)


class InOneProcess(nn.Module):
    """The oracle that replaces a stage: each rank has the gradients of all batches, and updates all
    parameters.

    Only the assignment of parts to ranks is the library's.
    """

    sync = True

    def __init__(self, module, bucket_cap_bytes=25 * 2**20, group=None,
                 find_unused_parameters=False):
        super().__init__()
        self.module, self.group, self.sum = module, group, 0
        self.find_unused_parameters = find_unused_parameters
        module.recompute = None  # torch.autograd.grad goes through no reentrant checkpoint
        tensors = [p.detach() for p in module.parameters()]
        flat = pack(tensors)
        dist.broadcast(flat, group=group, group_src=0)
        unpack(flat, tensors)
        self.buckets = self.make_buckets(bucket_cap_bytes)

    def make_buckets(self, bucket_cap_bytes):
        trained = [p for p in self.module.parameters() if p.requires_grad]
        return buckets_of(trained, bucket_cap_bytes, lambda _: self.group, ShardedBucket)

    def make_optimizer(self, new_optimizer, groups=None):
        self.alone = OneProcess(self.module, new_optimizer)
        self.alone.optimizer.register_step_post_hook(lambda *_: self.step_ends())
        return self.alone.optimizer

    def step_ends(self):
        self.alone.copy_masters()
        self.sum = 0

    def forward(self, tokens):
        if not torch.is_grad_enabled():
            return self.module(tokens)
        self.sum = self.sum + self.alone.gradients_of(tokens)
        if self.sync:
            self.average_gradients()
        with torch.no_grad():
            logits = self.module(tokens)
        return logits.requires_grad_()

    def average_gradients(self):
        """Give the masters the means over ranks, and the parts their own part of them."""
        mean = self.sum / dist.get_world_size(self.group)
        dist.all_reduce(mean, group=self.group)
        mean_of = self.alone.set_gradients(mean)
        for part in (part for bucket in self.buckets for part in bucket.parts):
            mean = mean_of.get(part.parameter)
            part.master.grad = None if mean is None else (
                mean.flatten()[part.start : part.start + len(part.master)])

    def state_dict(self):
        return self.module.state_dict()


class InUnits(InOneProcess):
    """Of stage 3: the parameters of a unit lie in one flat tensor for each type, frozen ones apart.
    """

    order = ()

    def make_buckets(self, _):
        self.units = [SimpleNamespace(shards=self.shards_of(parameters))
                      for _, parameters in units_of(self.module)]
        return [bucket for unit in self.units for bucket in unit.shards]

    def shards_of(self, parameters):
        return [bucket for trained in (True, False) for bucket in buckets_of(
            [p for p in parameters if p.requires_grad == trained], 2**63, lambda _: self.group,
            ShardedBucket)]
