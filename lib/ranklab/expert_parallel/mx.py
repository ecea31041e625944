"""mxfp8_all_to_all: rows travel in 8 bits, with a scale for each 32 numbers."""

import torch

from ranklab.expert_parallel.dispatch import AllToAll


def mxfp8_all_to_all(x, to, came, group=None):
    """Exchange rows as AllToAll does, in the format MXFP8; return them in the dtype of x.

    Each 32 consecutive numbers of a row are a block. A block is divided by its scale and rounded to
    float8_e4m3fn, whose largest number is 448. The scale is the smallest power of two that leaves
    no magnitude of the divided block above 448 (a block of zeros may have any). It travels as one
    byte, its exponent + 127. The receiver multiplies again.
    There is no gradient.
    Shape: x (n, C), finite; the result (sum of came, C).
    Cost: 1 + 1/32 bytes a number; at most two all-to-alls.
    Raises: ValueError if 32 does not divide C.
    Paper: OCP Microscaling Formats (MX) v1.0; Mishra et al. 2025 round the scale up
        (arXiv 2506.08027)
    Lab: 11
    """
    if x.shape[1] % 32:
        raise ValueError(f"blocks of 32 must divide rows of {x.shape[1]} numbers")
    blocks = x.detach().float().unflatten(1, (-1, 32))  # (n, C/32, 32)
    mantissa, exponent = torch.frexp(blocks.abs().amax(2, keepdim=True) / 448)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(min=-126)  # 0.5 * 2 ** e is a power of 2
    scales = (exponent + 127).to(torch.uint8)  # (n, C/32, 1); torch calls it float8_e8m0fnu
    numbers = (blocks / scales.view(torch.float8_e8m0fnu).float()).to(torch.float8_e4m3fn)
    # As bytes: not every backend sends the 8-bit types.
    numbers = AllToAll.apply(numbers.flatten(1).view(torch.uint8), to, came, group)
    scales = AllToAll.apply(scales.flatten(1), to, came, group).view(torch.float8_e8m0fnu)
    blocks = numbers.view(torch.float8_e4m3fn).float().unflatten(1, (-1, 32))
    return (blocks * scales.float()[:, :, None]).flatten(1).to(x.dtype)


def mxfp8_bytes(numbers):
    """Return the bytes of this many numbers in MXFP8, with their scales."""
    return numbers * 33 / 32
