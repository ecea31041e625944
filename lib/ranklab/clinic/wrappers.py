"""Wrappers, for hooks.py, of torch's functions that communicate, read and write."""

import functools
import inspect
import threading
import types
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data.distributed import DistributedSampler

from ranklab.clinic.digests import digest_of
from ranklab.clinic.observer import SMALLEST, line_of_program
from ranklab.meter.storage import tensors_in

STEP_NAMES = ("step", "global_step", "iteration", "epoch")  # usual names in a checkpoint


def around(owner, name, before=None, after=None):
    """Make `owner.name` call before(*arguments) first, and after(value, *arguments) last."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def call(*args, **options):
        if before:
            before(*args)
        value = real(*args, **options)
        if after:
            after(value, *args)
        return value

    setattr(owner, name, call)


# --- collectives ----------------------------------------------------------------------------------

def collectives(observer):
    """Observe which ranks wait where, and which reductions have not been waited for."""
    for name, function in [*vars(dist).items()]:
        is_function = type(function) is types.FunctionType
        if is_function and "async_op" in inspect.signature(function).parameters:
            setattr(dist, name, functools.wraps(function)(_with_reduction(observer, function)))

    def forget(work):
        observer.pending = [entry for entry in observer.pending if entry[0]() is not work]
        observer.in_flight = [entry for entry in observer.in_flight if entry[0]() is not work]

    def waits(work, *_):
        forget(work)
        write_in_main_thread("wait", line_of_program())

    def write_in_main_thread(*content):  # a thread that waits does not stop the program
        if threading.current_thread() is threading.main_thread():
            observer.lines.write(*content)

    def polled(is_done, work, *_):
        if is_done:
            forget(work)

    # the holder of the future waits for it: DDP does, for a hook's future
    around(dist.Work, "get_future", before=forget)
    around(dist.Work, "is_completed", after=polled)
    around(dist.Work, "wait", before=waits, after=lambda *_: write_in_main_thread("back"))


def _with_reduction(observer, real):
    reduces = "reduce" in real.__name__

    def call(*args, **options):
        ops = [value for value in (*args, *options.values())
               if isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType))]
        observer.reduction = str(getattr(ops[0], "op", ops[0])).rpartition(".")[2] if ops else "SUM"
        observer.spans = []
        try:
            work = real(*args, **options)
        finally:
            observer.reduction = None
        if isinstance(work, dist.Work):
            is_gradient = reduces and observer.numel >= SMALLEST  # not, for example, a logged loss
            reference, line = weakref.ref(work), line_of_program()
            observer.pending.append((reference, line, is_gradient))
            observer.in_flight += [(reference, *span, line) for span in observer.spans]
        return work

    return call


# --- files, samplers ------------------------------------------------------------------------------

def files(observer):
    def write(word, content):
        if (version := _version(observer, content)).bits:  # else torch unpickles a part of it
            observer.lines.write(word, *version)

    around(torch, "load", after=lambda content, *_: write("load", content))
    around(torch, "save", before=lambda content, *_: write("save", content))


class Version(NamedTuple):
    """The content of a file: which step, and which bits."""

    steps: int  # of the optimizer so far
    step: int | None  # that the file itself names
    bits: int  # of all its tensors; 0: it has none
    states: list  # state_of, for each optimizer's state in it that is not empty


def _version(observer, content):
    entries = content if isinstance(content, dict) else {}
    step = next((int(entries[name]) for name in STEP_NAMES
                 if isinstance(entries.get(name), (int, float, torch.Tensor))), None)
    with _disable_current_modes(), torch.no_grad():
        return Version(observer.steps, step, digest_of(*tensors_in(content)).bits, [
            state_of(entry["param_groups"], entry["state"])
            for entry in (content, *entries.values())
            if isinstance(entry, dict) and entry.get("state") and "param_groups" in entry])


def state_of(groups, state):
    """Describe an optimizer's state: for how many parameters, the names in it, whether the decay is
    AdamW's (which has Adam's names), and the sizes of each parameter's largest tensors.
    """
    sizes = [max((tensor.numel() for tensor in tensors_in(entry)), default=0)
             for entry in state.values()]
    return [sum(len(group["params"]) for group in groups),
            sorted({str(name) for entry in state.values() for name in entry}),
            any(group.get("decoupled_weight_decay", False) for group in groups), sorted(sizes)]


def samplers(observer):
    def remember(sampler):
        observer.passes[id(sampler)] = sampler.epoch, sampler.shuffle

    around(DistributedSampler, "__iter__", before=remember)


def begin_passes(observer, is_training):
    """Record the passes that samplers have begun, if a model is trained with their examples."""
    for sampler, arguments in observer.passes.items() if is_training else ():
        observer.lines.write("pass", sampler, *arguments)
    observer.passes.clear()
