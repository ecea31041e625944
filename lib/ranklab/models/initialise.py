"""Fresh weights that follow from a parameter's name: any part of a model can be made alone."""

import hashlib

import torch


def seed_of(name, seed=None):
    """A seed for the parameter `name`; seed None: that of the last torch.manual_seed."""
    seed = torch.initial_seed() if seed is None else seed
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


@torch.no_grad()
def normal_by_name(parameter, name, std, seed=None):
    """`parameter` is normal with `std`, the same values on every device and in every process.

    The whole is drawn on the CPU in float32; a shard is cut from it.
    """
    if parameter.is_meta:
        return
    generator = torch.Generator().manual_seed(seed_of(name, seed))
    parameter.copy_(torch.empty(parameter.shape).normal_(std=std, generator=generator))
