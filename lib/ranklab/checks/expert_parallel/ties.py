"""Sorts without a guarantee for equal numbers: what some machine may do happens on each."""

import torch
from torch.overrides import TorchFunctionMode


class UnstableSorts(TorchFunctionMode):
    """A mode that reorders equal numbers in topk, and in every sort without stable=True.

    On one machine such a sort is stable by chance, on another it is not.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        unstable = UNSTABLE.get(getattr(func, "__name__", ""), func)
        return unstable(*args, **kwargs or {})


def sort(input, dim=-1, descending=False, stable=False):
    if stable:
        return torch.sort(input, dim=dim, descending=descending, stable=True)
    values, places = torch.sort(input.flip(dim), dim=dim, descending=descending, stable=True)
    return torch.return_types.sort((values, input.shape[dim] - 1 - places))


def argsort(input, dim=-1, descending=False, stable=False):
    return sort(input, dim, descending, stable).indices


def topk(input, k, dim=-1, largest=True, sorted=True):
    n = input.shape[dim]
    if not 0 <= k <= n:
        return torch.topk(input, k, dim)  # torch says what is wrong
    values, places = sort(input, dim, descending=largest)
    return torch.return_types.topk((values.narrow(dim, 0, k), places.narrow(dim, 0, k)))


UNSTABLE = {each.__name__: each for each in (sort, argsort, topk)}
