"""Parameters that a step does not use: on some ranks, on all, and as an error."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.data_parallel.events import Sent, collectives_noted
from ranklab.checks.data_parallel.toys import gradients, rows
from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import is_near
from ranklab.engine import device


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
    wrapped = wrapped_class(model, cap_bytes=1, find_unused=True)
    for used in USED:
        model.zero_grad()
        loss, sent = wrapped(rows(rank), used[rank]).square().mean(), Sent()
        with collectives_noted(sent.note):
            loss.backward()
        alone = copy.deepcopy(model)
        alone.zero_grad()
        for r in range(R):
            (alone(rows(r), used[r]).square().mean() / R).backward()
        asked = sum(x.dtype == torch.int32 for x in sent.tensors)
        steps.append((used, gradients(model), gradients(alone), sent.not_waited, asked))
    return steps, _said(wrapped_class, (0, 1) if rank == 1 else (0, 1, 2))


def _said(wrapped_class, used):
    """What this rank's backward raises when rank 1 skips a branch; then: is all as before?"""
    wrapped = wrapped_class(Branches().to(device()), cap_bytes=1)
    said = None
    wrapped(rows(0), ALL).square().mean().backward()  # from here on no gradient is None
    try:
        wrapped(rows(0), used).square().mean().backward()
    except ValueError as error:
        said = str(error)
    full = all(bucket.missing == set(bucket.parameters) for bucket in wrapped.buckets)
    return said, full and not wrapped.works and list(wrapped.waiting) == wrapped.buckets


def compare_branches(where, used, got, right, not_waited, asked):
    if not_waited:
        raise Mistake(f"{where}: nobody has waited for {not_waited} of its all-reduces when "
                      "backward() returns", "In finish() first launch what is left, and then wait "
                      "for every handle.")
    for name, grad in right.items():
        which = f"branch {name.split('.')[1]}"
        if grad is None and got[name] is not None:
            raise Mistake(f"{where}: {which}, which no rank used, now has a gradient",
                          "With momentum or weight decay zeros move a weight. self.used_anywhere() "
                          "tells which parameters have a gradient somewhere.")
        if grad is None:
            continue
        if got[name] is None:
            raise Mistake(f"{where}: {which}, which other ranks used, has no gradient here",
                          "bucket.fill_none(used) gives it the others' mean, after the wait; used "
                          "= self.used_anywhere() when self.find_unused is set.")
        if not is_near(got[name], grad):
            raise Mistake(f"{where}: the gradient of {which} is not the mean, with zeros from "
                          f"ranks that did not use it (used: {used})",
                          "bucket.gather() puts zeros where a gradient is None, in each step anew. "
                          "And used_anywhere() comes after the last bucket, on every rank.")
    if asked > 1:
        raise Mistake(f"{where}: {asked} calls of used_anywhere() in one backward", "It is a "
                      "message, and tells of all parameters: ask once, then fill all buckets.")


def compare_error(rank, said, is_ready):
    if rank == 1 and said is None:
        raise Mistake("rank 1 has no gradient for branch 2, find_unused is False, and no error "
                      "comes", "It would train on without that branch's gradient from this rank: "
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
