"""Tensors share storages; memory is counted in storages."""

from collections.abc import Iterator

import torch

PLAIN = {torch.Tensor, torch.nn.Parameter}  # nothing is inside these
HOLD_NONE = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout}


def storages_of(tensor):
    """Return the storages of a tensor: one, or for DTensor and other wrappers those inside.

    `storage._cdata` identifies a storage while it is alive, even on the meta device.
    """
    if tensor.layout is torch.sparse_coo:
        return [*storages_of(tensor._indices()), *storages_of(tensor._values())]
    if type(tensor) in PLAIN or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor.untyped_storage()]
    names, _ = tensor.__tensor_flatten__()  # also names a DTensor's mesh
    parts = (getattr(tensor, name) for name in names)
    return [storage for part in parts if isinstance(part, torch.Tensor)
            for storage in storages_of(part)]


def tensors_in(value):
    """Return all tensors in nested dicts, lists, tuples, sets and generators."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple, set, Iterator)):
        return []
    tensors = []
    for item in value:  # most are tensors or numbers, which need no further call
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif type(item) not in HOLD_NONE:
            tensors += tensors_in(item)
    return tensors
