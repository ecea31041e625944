"""Adasum: add gradients that point in different directions, average those that agree.

For two gradients it is a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2). This adds orthogonal gradients
and averages equal ones, and gradients twice as large give a result twice as large. So the learning
rate for one rank also works for many ranks. More than two gradients combine in pairs, in a tree.
Built on `sendrecv` of collectives.
"""

import torch
import torch.distributed as dist

from ranklab.collectives import sendrecv


def adasum_of_two(a, b):
    """Combine two gradients by the definition: average the part they share, and add the rest."""
    a64, b64 = a.double().flatten(), b.double().flatten()
    dot, aa, bb = a64 @ b64, a64 @ a64, b64 @ b64
    a64 = a64 * (1 - dot / (2 * aa)) if aa > 0 else a64
    b64 = b64 * (1 - dot / (2 * bb)) if bb > 0 else b64
    return (a64 + b64).to(a.dtype).view(a.shape)


def adasum_length(a, b, cosine):
    """Return the length of the Adasum of two gradients with lengths `a` and `b` and this cosine."""
    along, across = b * cosine, b * (1 - cosine**2) ** 0.5
    pair = torch.tensor([[a, 0.0], [along, across]], dtype=torch.float64)
    return adasum_of_two(*pair).norm().item()


def adasum(x, sizes=None, group=None):
    """Return the Adasum of all ranks' `x`, the same on every rank; leave `x` unchanged.

    `x` may hold several tensors one after the other, of `sizes` elements: combine each of them
    separately. Accumulate dot products in float64.

    Cost: 2(R-1)/R of x's bytes, like a ring: the vector is halved while the distance doubles.
    Raises: ValueError if the number of ranks is not a power of two.
    Paper: Maleki et al. 2020, "Scaling distributed training with adaptive summation"
    Lab: 05
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    if R & (R - 1):
        raise ValueError(f"Adasum combines ranks in pairs: {R} is not a power of two")
    sizes = torch.tensor(sizes or [x.numel()], device=x.device)
    tensor_of = torch.arange(len(sizes), device=x.device).repeat_interleave(sizes)  # each element's
    part, lengths, distance = x.flatten(), [], 1
    while distance < R:  # down: my part is half of what it was, and combines twice as many ranks
        peer, is_left = rank ^ distance, rank & distance == 0
        lengths.append(part.numel())
        left, right = part.tensor_split(2)
        local_half, sent_half = (left, right) if is_left else (right, left)
        tensor_of = tensor_of.tensor_split(2)[0 if is_left else 1]
        peer_half = sendrecv(sent_half, peer, torch.empty_like(local_half), peer, group)
        a, b = (local_half, peer_half) if is_left else (peer_half, local_half)
        dots = dot_products(a, b, tensor_of, len(sizes))
        step = 1
        while step <= distance:  # the other parts of the same two vectors are on these ranks
            dots += sendrecv(dots, rank ^ step, torch.empty_like(dots), rank ^ step, group)
            step *= 2
        ab, aa, bb = dots
        of_a = 1 - torch.where(aa > 0, ab / (2 * aa), 0)
        of_b = 1 - torch.where(bb > 0, ab / (2 * bb), 0)
        part = (of_a[tensor_of] * a + of_b[tensor_of] * b).to(x.dtype)
        distance *= 2
    return gather_halves(part, lengths, group).view(x.shape) if R > 1 else x.clone()


def gather_halves(part, lengths, group=None):
    """Gather the whole vector on every rank; `part` is the rank's part of it after the halvings.

    `lengths` are the lengths of the rank's part before each halving.
    """
    rank, distance = dist.get_rank(group), 2 ** len(lengths)
    for length in reversed(lengths):  # the same partners again, the last one first
        distance //= 2
        peer, is_left = rank ^ distance, rank & distance == 0
        peer_part = part.new_empty(length - part.numel())
        sendrecv(part, peer, peer_part, peer, group)
        part = torch.cat([part, peer_part] if is_left else [peer_part, part])
    return part


def dot_products(a, b, tensor_of, tensors):
    """Return a.b, a.a and b.b of each tensor, in float64: shape (3, tensors).

    `tensor_of` holds, for each element, the number of its tensor; `tensors` is how many there are.
    """
    a, b = a.double(), b.double()
    dots = torch.zeros(3, tensors, dtype=torch.float64, device=a.device)
    return dots.index_add_(1, tensor_of, torch.stack([a * b, a * a, b * b]))
