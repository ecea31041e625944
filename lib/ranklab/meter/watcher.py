"""Watcher: it is told of every tensor op; the meters that look at ops are built on it."""

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Watcher(TorchDispatchMode):
    """While it is on, told(func, args, kwargs, result) is called after each op of its thread and
    of backward's threads; and asked(func, args, kwargs), if given, before it.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls):
        # False would make torch run compiled functions uncompiled, in the block and ever after.
        return True

    def __init__(self, owner, told, asked=None):
        super().__init__()
        self.owner, self.told, self.asked = owner, told, asked

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(_has_handler(kind) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if self.asked:
            self.asked(func, args, kwargs)
        result = func(*args, **kwargs)
        self.told(func, args, kwargs, result)
        return result


def _has_handler(kind):
    """True for DTensor and other tensors that take an op apart in a handler of their own.

    That handler must run with a meter's mode still on, or what a DTensor does inside would be
    invisible; NotImplemented makes torch call it first. A FakeTensor has nothing inside, and the
    mode that works on it comes after this one; a tensor of a rehearsed GPU has nothing either.
    """
    if issubclass(kind, FakeTensor) or hasattr(kind, "at"):
        return False
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
