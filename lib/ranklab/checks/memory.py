"""The tensors that this process holds, whatever object holds them."""

import gc

import torch

from ranklab.meter.storage import storages_of


def held_bytes(besides=()):
    """Count the bytes of all tensors that anything in this process holds, except `besides`."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    sizes = {storage._cdata: storage.nbytes() for x in tensors for storage in storages_of(x)}
    exceptions = {storage._cdata for x in besides for storage in storages_of(x)}
    return sum(nbytes for key, nbytes in sizes.items() if key not in exceptions)
