"""Optimizers whose step waits for gradients that are averaged while backward still runs.

`distributed_optimizer` is the idea; `DistributedOptimizer` is Horovod's class, with its options.
"""

import warnings
from contextlib import contextmanager

import torch

from ranklab.horovod.compression import Compression
from ranklab.horovod.negotiation import Adasum, Average
from ranklab.horovod.ops import allreduce_async_, synchronize
from ranklab.horovod.world import size


def distributed_optimizer(optimizer, named_parameters, compression=Compression.none):
    """Make optimizer.step() use gradients averaged over all ranks; return the same optimizer.

    Request the average of a gradient as soon as backward has computed it; step() waits for all,
    before step(closure) calls its closure: so here backward must come before step().

    Cost: one request for each parameter and step.
    Raises: ValueError for a second backward before step(); DistributedOptimizer has
        backward_passes_per_step.
    Lab: 05
    """
    names = {p: name for name, p in named_parameters if p.requires_grad}
    handles = {}

    def ask(p):  # backward has just added the last part of p.grad
        if p in handles:
            raise ValueError(f"{names[p]!r} is being averaged: one backward for each step()")
        small, ctx = compression.compress(p.grad)
        handles[p] = allreduce_async_(small, name=names[p], op=Average), ctx

    def wait(*_):
        for p in names:
            if p not in handles:  # this rank did not use it; another may have, and waits
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                ask(p)
        for p, (handle, ctx) in handles.items():
            p.grad = compression.decompress(synchronize(handle), ctx)
        handles.clear()

    for p in names:
        p.register_post_accumulate_grad_hook(ask)
    optimizer.register_step_pre_hook(wait)
    return optimizer


def DistributedOptimizer(optimizer, named_parameters=None, compression=Compression.none,
                         backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0):
    """Return an optimizer for all ranks, of the same class, with the same parameters and state.

    backward_passes_per_step   how many backward passes add up before gradients travel
    op                         Average, Sum, or Adasum (of steps, not of gradients)
    gradient_predivide_factor  an average divides by it before the sum, and by size()/it afterwards

    Raises: ValueError for unnamed parameters, or two with one name; for factors that make no sense.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor divides an average: it needs op=Average")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} must be 1 or more")
    is_alone = size() == 1  # then there is nothing to combine
    mixin = _AdasumOfSteps if op == Adasum and not is_alone else _AverageOfGradients
    kind = type(optimizer)
    subclass = type(kind.__name__, (mixin, kind), {})
    distributed = subclass.__new__(subclass)  # not subclass(...): that would forget the state
    # A scheduler may have wrapped the old one's step.
    distributed.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
    distributed._prepare(_names(optimizer, named_parameters), compression,
                         backward_passes_per_step, op, gradient_predivide_factor)
    return distributed


def _names(optimizer, named_parameters):
    """Return {parameter: name} for all parameters that the optimizer changes."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        named = [(f"allreduce.noname.{i}", p) for i, p in enumerate(parameters)]
    else:
        named = list(named_parameters)
    if not all(isinstance(one, tuple) for one in named):
        raise ValueError("named_parameters must be (name, parameter) pairs: give it "
                         "model.named_parameters()")
    names = [name for name, _ in named]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"parameters need different names; given twice: {', '.join(duplicates)}")
    name_of = {p: name for name, p in named}
    if missing := sum(p not in name_of for p in parameters):
        raise ValueError(f"{missing} of the optimizer's {len(parameters)} parameters have no name "
                         "in named_parameters")
    return {p: name_of[p] for p in parameters if p.requires_grad}


class _AverageOfGradients:
    """A base class placed before the optimizer's own: its step() waits for the averages."""

    def _prepare(self, names, compression, passes, op, predivide):
        self._names, self._compression, self._op = names, compression, op
        self._predivide, self._handles = predivide, {}
        self._is_synchronized, self._skips = False, False
        self.set_backward_passes_per_step(passes)
        for p in names:
            p.register_post_accumulate_grad_hook(self._count)

    def set_backward_passes_per_step(self, passes):
        """Send gradients after every `passes` backward passes, counted from the next pass."""
        self.backward_passes_per_step = passes
        self._left = dict.fromkeys(self._names, passes)

    def _count(self, p):
        """Count a backward pass that added to p.grad; after the last one, start its average."""
        if p in self._handles:
            raise AssertionError(
                f"gradients were computed more than backward_passes_per_step="
                f"{self.backward_passes_per_step} times before step(): {self._names[p]!r} is "
                "being averaged already")
        self._left[p] -= 1
        if self._left[p] == 0:
            self._ask(p)

    def _ask(self, p):
        small, ctx = self._compression.compress(p.grad)
        self._handles[p] = allreduce_async_(
            small, name=self._names[p], op=self._op, prescale_factor=1 / self._predivide,
            postscale_factor=self._predivide), ctx

    def synchronize(self):
        """Replace every gradient by its average; call it before step() to clip or read gradients.
        """
        self._is_synchronized = True
        for p in self._names:
            if p not in self._handles:  # another rank may have used it, and waits
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                self._ask(p)
        for p, (handle, ctx) in self._handles.items():
            p.grad = self._compression.decompress(synchronize(handle), ctx)
        self._handles.clear()
        self.set_backward_passes_per_step(self.backward_passes_per_step)

    @contextmanager
    def skip_synchronize(self):
        """Keep step() from synchronizing inside the block, when synchronize() was already called.
        """
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure=None):
        """Take the optimizer's step with averaged gradients.

        Raises: ValueError for a closure: its gradients would come after the averages.
        """
        if closure is not None:
            raise ValueError("step(closure) is not built here: call backward() before step()")
        if not self._skips:
            if self._is_synchronized:
                warnings.warn("step() after synchronize() averages once more: put it into "
                              "`with optimizer.skip_synchronize():`", stacklevel=2)
            self.synchronize()
        self._is_synchronized = False
        super().step()

    def zero_grad(self, *args, **kwargs):
        if self._handles:
            raise AssertionError(
                "zero_grad() came after backward() and before step() or synchronize(): the "
                "background thread is still averaging these gradients")
        return super().zero_grad(*args, **kwargs)


class _AdasumOfSteps:
    """A base class placed before the optimizer's own: Adasum combines ranks' *changes*.

    So Adam's division by the gradients' size comes first. Horovod does this parameter by parameter
    in backward; here it happens in step(), for gradients of any number of backward passes.
    """

    def _prepare(self, names, compression, *_):
        self._names, self._compression = names, compression

    def step(self, closure=None):
        before = {p: p.detach().clone() for p in self._names}
        loss = super().step(closure)
        handles = {}
        for p, name in self._names.items():
            small, ctx = self._compression.compress(p.detach() - before[p])
            handles[p] = allreduce_async_(small, name=name, op=Adasum), ctx
        for p, (handle, ctx) in handles.items():
            p.data.copy_(before[p] + self._compression.decompress(synchronize(handle), ctx))
        return loss
