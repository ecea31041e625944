"""Fresh weights derived from a parameter's name: any part of a model can be made by itself."""

import hashlib

import torch


def seed_of(name, seed=None):
    """Return a seed for the parameter `name`.

    seed: by default the seed of the last torch.manual_seed
    """
    seed = torch.initial_seed() if seed is None else seed
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


@torch.no_grad()
def normal_by_name(parameter, name, std, seed=None):
    """Fill `parameter` with normal numbers, the same on every device and in every process.

    Their standard deviation is `std`. The whole matrix is drawn on the CPU in float32; a shard is
    cut from it.
    """
    if parameter.is_meta:
        return
    generator = torch.Generator().manual_seed(seed_of(name, seed))
    parameter.copy_(torch.empty(parameter.shape).normal_(std=std, generator=generator))
