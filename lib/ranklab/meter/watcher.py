"""Watcher: a callback for every tensor op; the meters that look at ops are built on it."""

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Watcher(TorchDispatchMode):
    """Call back around each op of this thread, and of backward's threads, while it is active.

    after: called as after(func, args, kwargs, result)
    before: called as before(func, args, kwargs); None: no callback
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls):
        # False would make torch run compiled functions uncompiled, in the block and ever after.
        return True

    def __init__(self, owner, after, before=None):
        super().__init__()
        self.owner, self.after, self.before = owner, after, before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(_has_handler(kind) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if self.before:
            self.before(func, args, kwargs)
        result = func(*args, **kwargs)
        self.after(func, args, kwargs, result)
        return result


def _has_handler(kind):
    """Return True for DTensor and other tensors whose own handler splits an op into other ops.

    That handler must run while a meter's mode is still active, or the ops inside a DTensor would
    be invisible; NotImplemented makes torch call the handler first. A FakeTensor has no ops inside,
    and its own mode comes after this one; a tensor of a rehearsed GPU has none either.
    """
    if issubclass(kind, FakeTensor) or hasattr(kind, "at"):
        return False
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
