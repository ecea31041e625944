"""Wrappers of torch's functions that communicate, read and write: for hooks.py."""

import functools
import inspect
import types
import weakref

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data.distributed import DistributedSampler

from ranklab.clinic.marks import mark_of
from ranklab.clinic.observer import SMALLEST, here
from ranklab.meter.storage import tensors_in

STEP_NAMES = ("step", "global_step", "iteration", "epoch")  # of a checkpoint, as people call it


def wrapped(owner, name, make):
    """`owner.name` is replaced by make(the old one)."""
    real = getattr(owner, name)
    setattr(owner, name, functools.wraps(real)(make(real)))


# --- collectives ----------------------------------------------------------------------------------

def collectives(observer):
    """Who waits where, and what nobody has waited for."""
    for name, function in [*vars(dist).items()]:
        is_function = type(function) is types.FunctionType
        if is_function and "async_op" in inspect.signature(function).parameters:
            wrapped(dist, name, lambda real: _noting(observer, real))

    def handing(real):  # who has the future waits for it: DDP does, for what a hook returns
        def get_future(work):
            observer.pending = [each for each in observer.pending if each[0]() is not work]
            return real(work)
        return get_future

    def waiting(real):
        def wait(work, *args, **options):
            observer.pending = [each for each in observer.pending if each[0]() is not work]
            observer.lines.write("wait", here())
            value = real(work, *args, **options)
            observer.lines.write("back")
            return value
        return wait

    wrapped(dist.Work, "get_future", handing)
    wrapped(dist.Work, "wait", waiting)


def _noting(observer, real):
    reduces = "reduce" in real.__name__

    def call(*args, **options):
        ops = [each for each in (*args, *options.values())
               if isinstance(each, (dist.ReduceOp, dist.ReduceOp.RedOpType))]
        observer.reduction = str(getattr(ops[0], "op", ops[0])).rpartition(".")[2] if ops else "SUM"
        try:
            work = real(*args, **options)
        finally:
            observer.reduction = None
        if isinstance(work, dist.Work):
            is_gradient = reduces and observer.given >= SMALLEST  # and not a loss, say, for the log
            observer.pending.append((weakref.ref(work), here(), is_gradient))
        return work

    return call


# --- files, samplers ------------------------------------------------------------------------------

def files(observer):
    def loading(real):
        def load(*args, **options):
            content = real(*args, **options)
            observer.lines.write("load", *_version(observer, content))
            return content
        return load

    def saving(real):
        def save(content, *args, **options):
            observer.lines.write("save", *_version(observer, content))
            return real(content, *args, **options)
        return save

    wrapped(torch, "load", loading)
    wrapped(torch, "save", saving)


def _version(observer, content):
    """(steps so far, the step that it says, bits of all its tensors)"""
    said = content if isinstance(content, dict) else {}
    step = next((int(said[name]) for name in STEP_NAMES
                 if isinstance(said.get(name), (int, float, torch.Tensor))), None)
    with _disable_current_modes(), torch.no_grad():
        return observer.steps, step, mark_of(*tensors_in(content)).bits


def samplers(observer):
    def iterating(real):
        def __iter__(self):
            observer.passes[id(self)] = self.epoch, self.shuffle
            return real(self)
        return __iter__

    wrapped(DistributedSampler, "__iter__", iterating)


def begin_passes(observer, is_training):
    """What samplers have begun is a pass through the data, if a model is trained with it."""
    for sampler, about in observer.passes.items() if is_training else ():
        observer.lines.write("pass", sampler, *about)
    observer.passes.clear()
