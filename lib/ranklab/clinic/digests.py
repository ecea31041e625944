"""Digest: a tensor in five numbers, which show whether tensors are equal, scaled, or added up."""

import functools
import math
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

SAMPLE = 1 << 14  # elements of a tensor that `dot` and `bits` look at
ROWS = 256  # examples of a batch whose bits are recorded one by one
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LARGE = 2**63 - 1


class Digest(NamedTuple):
    """A tensor in five numbers; two tensors with equal `bits` are taken to be equal."""

    numel: int
    sum: float
    norm: float
    dot: float  # with random numbers that depend only on the length, so it is linear
    bits: int


def digest_of(*tensors):
    """Return the Digest of all these tensors together."""
    total = Digest(0, 0.0, 0.0, 0.0, 0)
    for digest in map(_digest_of_one, tensors):
        total = Digest(total.numel + digest.numel, total.sum + digest.sum,
                       math.hypot(total.norm, digest.norm), total.dot + digest.dot,
                       (31 * total.bits + digest.bits) % LARGE)
    return total


def _digest_of_one(tensor):
    if not has_numbers(tensor):
        return Digest(0, 0.0, 0.0, 0.0, 0)
    flat = plain(tensor).reshape(-1)
    n = flat.numel()
    sample = flat[::-(-n // SAMPLE)].contiguous()
    direction, _ = _random(len(sample), sample.device)
    numbers = flat if flat.is_floating_point() else flat.double()
    norm = torch.linalg.vector_norm(numbers, dtype=torch.float64)
    dot = direction @ sample.double()
    return Digest(n, numbers.sum(dtype=torch.float64).item(), norm.item(), dot.item(),
                  _bits(sample[None]).item())


def has_numbers(tensor):
    """Return whether the tensor has numbers: it is dense, not empty, and has memory."""
    tensor = plain(tensor)
    return (tensor.layout is torch.strided and tensor.numel() > 0 and tensor.device.type != "meta"
            and not isinstance(tensor, FakeTensor) and tensor.untyped_storage().nbytes() > 0)


def plain(tensor):
    """Return this rank's numbers, without a graph; for a DTensor, its local shard."""
    tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor


def bits_of_rows(tensor):
    """Return the bits of the first examples of a batch, one by one."""
    rows = plain(tensor)[:ROWS]
    return _bits(rows.reshape(len(rows), -1).contiguous()).tolist() if rows.numel() else []


def _bits(rows):
    """Return one number for each row, which depends on all its bits and their places."""
    words = rows.view(WORDS[rows.element_size()])
    return (words * _random(words.shape[1], words.device)[1]).sum(1) % LARGE


@functools.lru_cache(64)
def _random(n, device):
    """Draw n numbers between -1 and 1, and n odd integers, the same on every rank."""
    generator = torch.Generator().manual_seed(n)
    numbers = torch.rand(n, generator=generator, dtype=torch.float64) * 2 - 1
    integers = torch.randint(LARGE, (n,), generator=generator) | 1
    return numbers.to(device), integers.to(device)
