"""Lab 06: right answers that differ from the library's. Each must pass."""

import torch


def partition_flat__pad(tensors, ranks):
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % ranks))
    return flat, list(flat.reshape(ranks, -1))
