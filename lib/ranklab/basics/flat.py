"""Pack many tensors into one, and unpack them: even the smallest message costs its latency."""

import torch


def pack(tensors):
    """Concatenate `tensors`, of one type, into one flat tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def as_bytes(x):
    """View contiguous `x` as bytes, so that gloo can broadcast types it lacks, such as int16."""
    # A single number may have any stride and counts as contiguous; view() accepts only stride 1.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def pieces(flat, tensors):
    """Return views of `flat`, in the shapes of `tensors`, of the parts where pack() puts them."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


def unpack(flat, tensors):
    """Copy `flat` into `tensors`, one after the other; the inverse of pack()."""
    for tensor, piece in zip(tensors, pieces(flat, tensors)):
        tensor.copy_(piece)
