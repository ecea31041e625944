"""Many tensors in one flat one, and back: a message costs its latency however small it is."""

import torch


def pack(tensors):
    """The elements of `tensors`, of one type, one tensor after the other in one flat tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def as_bytes(x):
    """View contiguous `x` as bytes: so it can be broadcast where gloo lacks its type, as int16."""
    return x.view(-1).view(torch.uint8)


def pieces(flat, tensors):
    """The parts of `flat` where pack() puts `tensors`, as views in their shapes."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


def unpack(flat, tensors):
    """`tensors` hold what lies in `flat`, one tensor after the other."""
    for tensor, piece in zip(tensors, pieces(flat, tensors)):
        tensor.copy_(piece)
