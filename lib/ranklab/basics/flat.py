"""Many tensors in one flat one, and back: a message costs its latency however small it is."""

import torch


def pack(tensors):
    """Concatenate `tensors`, of one type, into one flat tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def as_bytes(x):
    """View contiguous `x` as bytes, so that gloo can broadcast types it lacks, such as int16."""
    # One number may have any stride and counts as contiguous; view() takes 1 alone.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def pieces(flat, tensors):
    """Return the parts of `flat` where pack() puts `tensors`, as views in their shapes."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


def unpack(flat, tensors):
    """Copy `flat` into `tensors`, one after the other; the opposite of pack()."""
    for tensor, piece in zip(tensors, pieces(flat, tensors)):
        tensor.copy_(piece)
