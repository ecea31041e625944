"""The learner's hook in torch's DDP, on a model with known gradients; a record of its actions."""

import functools
import inspect
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranklab.checks.exercise import Mistake
from ranklab.checks.looks import expect, on_groups
from ranklab.engine import device
from ranklab.meter import Traffic

SHAPES = ((12, 10), (8,), (1,), (5, 3, 3), (45,))
COUNT = sum(torch.Size(shape).numel() for shape in SHAPES)  # 219: an odd number

BACK = ("DDP uses what the future holds: in .then(...), copy the result into bucket.buffer() and "
        "return that buffer.")
LIST = ("A finished future's value() is a list with one tensor: use value()[0], and return the "
        "buffer.")
FUNCTION = ("Pass .then(...) a function, not the function's result: it is called when the sum is "
            "ready.")
OF_DDP = {  # what C++ says, as a regex of all of it: what it means here, and a hint
    ".*must return a torch.futures.Future.*": (
        "DDP wants a future, and gets something else",
        "dist.all_reduce(..., async_op=True).get_future() is one, and so is what its .then(...) "
        "returns. DDP goes on with backward meanwhile."),
    ".*expected the hook result is a PyObject.*": (
        "the future that DDP gets holds the all-reduce's list, not the bucket", BACK),
    r"\w+: Expected a proper Tensor but got None.*": (
        "what runs in .then(...) returns None", BACK),
    r"\w+: Unable to cast \[tensor\(.*": ("what runs in .then(...) returns a list", LIST),
    r"RuntimeError: .*completed\(\) INTERNAL ASSERT.*": (
        "value() is called on a future that is not done", FUNCTION),
    r"TypeError: then\(\): incompatible function arguments.*": (
        ".then(...) gets no function", FUNCTION),
    ".*Invalid scalar type": (
        "gloo can't send numbers of this type", ".view(torch.uint8) before, and back after."),
}


class Given(nn.Module):
    """A model whose gradient is its flat input tensor; one parameter is frozen."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, gradient):
        parts = gradient.split([p.numel() for p in self.weights])
        return sum((p.flatten() * part).sum() for p, part in zip(self.weights, parts))


def hook_on_groups(trial, hook, ranks, *grouping):
    """Run on_groups; put DDP's errors about a hook in plain words."""
    names = inspect.signature(hook).parameters
    expect("bucket" in names and names["bucket"].annotation in (dist.GradBucket,
                                                                inspect.Parameter.empty),
           f"DDP refuses it: its parameters are {', '.join(map(str, names.values()))}",
           "The second one must be named bucket; its annotation, if any, must be dist.GradBucket.")
    try:
        return on_groups(trial, hook, ranks, *grouping)
    except Mistake as mistake:  # DDP's own messages are of C++
        for pattern, meaning in OF_DDP.items():
            if re.fullmatch(pattern, mistake.cause, re.S):
                raise Mistake(*meaning) from None
        raise


def alike(where, x, ranks, hint):
    """Return a check that x is the same on all ranks of the group, to the last bit."""
    of_ranks = [torch.empty_like(x) for _ in ranks.members]
    dist.all_gather(of_ranks, x.contiguous(), group=ranks.group)
    same = torch.allclose(x, of_ranks[0], 0, 0, equal_nan=True)
    return partial(expect, same, f"{where} is not that of rank {ranks.members[0]}", hint)


# --- what a hook did ------------------------------------------------------------------------------

@dataclass
class Call:
    """The hook's actions on one bucket on this rank, until it returned."""

    nbytes: int  # of the bucket
    ops: list = ()  # what it gave to collectives
    waited: bool = False  # for what was not done yet
    sent: list = field(default_factory=list)  # all-reduced: kept, so that no other gets its memory


def steps_in_ddp(state, hook, model, inputs, group=None, bucket_cap_bytes=180):
    """Run a step of DDP with the hook on each of `inputs`.

    From the second step on, DDP has several buckets of Given, two of them of the same size.
    Returns: [(the flat gradient, on the CPU; [Call of each bucket]), ...], one for each input
    """
    model = DistributedDataParallel(model.to(device()), process_group=group,
                                    bucket_cap_mb=bucket_cap_bytes / 2**20)
    steps, gradients = [], []
    model.register_comm_hook(state, watched(hook, steps))
    for x in inputs:
        model.zero_grad()
        model(x.to(device())).backward()
        gradients.append(torch.cat([p.grad.flatten().cpu() for p in model.parameters()
                                    if p.requires_grad]))
    return list(zip(gradients, steps))


def watched(hook, steps):
    """Wrap the hook, so that `steps` gets [Call of each bucket] of each step."""
    calls = []

    @functools.wraps(hook)  # DDP reads the signature
    def watching(state, bucket):
        call = Call(bucket.buffer().nbytes)
        with Traffic() as traffic, _noted(call):
            future = hook(state, bucket)
        call.ops = traffic.ops
        calls.append(call)
        if bucket.is_last():
            steps.append(list(calls))
            calls.clear()
        return future

    return watching


@contextmanager
def _noted(call):
    """Record in `call`, inside the block, the tensors all-reduced, and what this thread waits for.
    (Other threads may wait: they run the work that follows the transfer.)
    """
    thread, work, future = get_ident(), dist.Work, torch._C.Future
    before = [(dist, "all_reduce", dist.all_reduce), *((each, "wait", each.wait)
                                                       for each in (work, future))]

    def kept(tensor, *args, **kwargs):
        call.sent.append(tensor)
        return before[0][2](tensor, *args, **kwargs)

    def waiting(wait, is_done):
        def noted(self, *args, **kwargs):
            call.waited |= get_ident() == thread and not is_done(self)
            return wait(self, *args, **kwargs)

        return noted

    dist.all_reduce = kept
    work.wait = waiting(work.wait, work.is_completed)
    future.wait = waiting(future.wait, future.done)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
