"""OverlappedDataParallel in hard backwards: one inside another; one not for all parameters."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranklab.checks.data_parallel.events import Sent
from ranklab.checks.data_parallel.toys import Layers, gradients, loss_of, mean_gradients, off, rows
from ranklab.checks.exercise import Mistake
from ranklab.engine import device


class Hidden(Layers):
    """Its loss lies in an object into which nobody looks for tensors."""

    def forward(self, x):
        return SimpleNamespace(loss=super().forward(x).square().mean())


def _checkpointed(order):
    """Each layer runs in a checkpoint, whose backward is a backward inside the backward."""
    return Layers(order, call=lambda layer, x: checkpoint(layer, x, use_reentrant=True))


def nested_trial(wrapped_class):
    """{where: (gradients, the right ones)}, and what is said where a layer is in two checkpoints"""
    rank, R = dist.get_rank(), dist.get_world_size()
    x = [rows(r).requires_grad_() for r in range(R)]
    right = mean_gradients(Layers((0, 1)).to(device()), [(each,) for each in x])
    hidden, model = Hidden((0, 1)).to(device()), _checkpointed((0, 1)).to(device())
    with Sent():  # a result that nobody waits for does not arrive
        wrapped_class(hidden, bucket_cap_bytes=1)(x[rank]).loss.backward()
        loss_of(wrapped_class(model, bucket_cap_bytes=1), x[rank]).backward()
    seen = {"layers in checkpoints with use_reentrant=True": (gradients(model), right),
            "a loss that forward() returns inside an object": (gradients(hidden), right)}
    twice, said = wrapped_class(_checkpointed((0, 1, 0)).to(device()), bucket_cap_bytes=1), ""
    try:
        loss_of(twice, x[rank]).backward()
    except Exception as error:  # any: what is said of it comes after what is told before
        said = str(error)
    for work in twice.works:  # nobody else waits for them now
        if hasattr(work, "wait"):
            work.wait()
    return seen, said


def compare_nested(where, seen, said):
    for what, (got, right) in seen.items():
        for name in off(got, right):
            raise Mistake(f"{where}, {what}: the gradient of `{name}` is not the mean", "Leave "
                          "self.backward_begins() where it is, first in the hook: it sees to it "
                          "that finish() is called at the end of backward.")
    if "two gradients" not in said:
        raise Mistake(f"{where}: a layer in two checkpoints gets two gradients in one backward, "
                      "and no error comes", "Its bucket may be on its way when the second one is "
                      "added. Leave `raise self.second_gradient(parameter)` in the hook.")


# --- parameters that a step does not use: on some ranks, on all, and as an error -----------------

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x, used):
        return sum(self.branches[i](x) for i in used)


# For each step the branches that each rank uses. In the third rank 0 alone misses something.
ALL = (0, 1, 2)
USED = (((0,), (0, 1), (1,), (0, 1)), ((1,),) * 4, ((1, 2), ALL, ALL, ALL), (ALL,) * 4)


def branches_trial(wrapped_class):
    rank, R, steps = dist.get_rank(), dist.get_world_size(), []
    model = Branches().to(device())
    wrapped = wrapped_class(model, bucket_cap_bytes=1, find_unused_parameters=True)
    for used in USED:
        model.zero_grad()
        loss = loss_of(wrapped, rows(rank), used[rank])
        with Sent() as sent:
            loss.backward()
        right = mean_gradients(model, [(rows(r), used[r]) for r in range(R)])
        asked = sum(x.dtype == torch.int32 for x in sent.tensors)
        steps.append((used, gradients(model), right, sent.ends[0], asked))
    return steps, _said(wrapped_class, (0, 1) if rank == 1 else (0, 1, 2))


def _said(wrapped_class, used):
    """What this rank's backward raises when rank 1 skips a branch; then: is all as before?"""
    wrapped = wrapped_class(Branches().to(device()), bucket_cap_bytes=1)
    said = None
    loss_of(wrapped, rows(0), ALL).backward()  # from here on no gradient is None
    try:
        loss_of(wrapped, rows(0), used).backward()
    except ValueError as error:
        said = str(error)
    full = all(bucket.missing == set(bucket.parameters) for bucket in wrapped.buckets)
    return said, full and not wrapped.works and list(wrapped.waiting) == wrapped.buckets


def compare_branches(where, used, got, right, not_waited, asked):
    if not_waited:
        raise Mistake(f"{where}: nobody has waited for {not_waited} of its all-reduces when "
                      "backward() returns", "In finish() first launch what is left, and then wait "
                      "for every handle.")
    branches = {name: f"branch {name.split('.')[1]}" for name in right}
    for name, branch in branches.items():
        if right[name] is None and got[name] is not None:
            raise Mistake(f"{where}: {branch}, which no rank used, now has a gradient",
                          "With momentum or weight decay zeros move a weight. self.used_anywhere() "
                          "tells which parameters have a gradient somewhere.")
    for name in off(got, right):
        if got[name] is None:
            raise Mistake(f"{where}: {branches[name]}, which other ranks used, has no gradient "
                          "here", "bucket.fill_none(used) gives it the others' mean, after the "
                          "wait; used = self.used_anywhere() with find_unused_parameters.")
        raise Mistake(f"{where}: the gradient of {branches[name]} is not the mean, with zeros from "
                      f"ranks that did not use it (used: {used})", "bucket.gather() puts zeros "
                      "where a gradient is None, in each step anew. And used_anywhere() comes "
                      "after the last bucket, on every rank.")
    if asked > 1:
        raise Mistake(f"{where}: {asked} calls of used_anywhere() in one backward", "It is a "
                      "message, and tells of all parameters: ask once, then fill all buckets.")


def compare_error(rank, said, is_ready):
    if rank == 1 and said is None:
        raise Mistake("rank 1 has no gradient for branch 2, find_unused_parameters is False, and "
                      "no error comes", "It would train on without that branch's gradient from "
                      "this rank: "
                      "raise self.no_gradient(missing) at the end of finish().")
    if rank != 1 and said:
        raise Mistake(f"rank {rank} has all its gradients, and still raises: {said}",
                      "`missing` is what this rank itself lacks.")
    if rank == 1 and "branches.2.weight" not in said:
        raise Mistake(f"the error is: {said}", "Name the missing: raise self.no_gradient(missing).")
    if not is_ready:
        raise Mistake(f"rank {rank} is not ready for another backward after that error",
                      "Raise last, when self.waiting, self.works and each bucket.missing are as "
                      "in the beginning.")
