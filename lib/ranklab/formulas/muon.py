"""Predict what Muon's Newton-Schulz costs when the rows of matrices are sharded."""

from typing import NamedTuple


def newton_schulz_flops(rows, columns, steps=5):
    """Count the FLOPs of Muon's Newton-Schulz on one matrix.

    A step on m x n, m <= n, multiplies the matrix with its transpose (2 m^2 n), squares the product
    (2 m^3), and multiplies that with the matrix (2 m^2 n).
    """
    m, n = sorted((rows, columns))
    return steps * (4 * m * m * n + 2 * m**3)


def muon_owners(shapes, ranks):
    """Choose the rank that orthogonalises each matrix, so that the busiest rank has few FLOPs.

    Greedy: largest matrix first, each to the rank with the fewest FLOPs so far.
    shapes: (m, n) of each matrix.
    """
    loads, owners = [0] * ranks, [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: -newton_schulz_flops(*shapes[i])):
        owners[i] = min(range(ranks), key=lambda rank: loads[rank])
        loads[owners[i]] += newton_schulz_flops(*shapes[i])
    return owners


class MuonCost(NamedTuple):
    """The cost of Newton-Schulz on the busiest rank: its FLOPs, and the bytes it sends in bf16."""

    flops: int
    sent_bytes: int


def muon_cost(shapes, ranks, on_all=False):
    """Compute the MuonCost of a step, for matrices whose rows are sharded.

    Each rank sends its rows to the matrix's owner (muon_owners), which sends orthogonal rows back.
    on_all: every rank instead gathers and orthogonalises all matrices.
    Lab: 06
    """
    own = [[n * (m // ranks + (rank < m % ranks)) for m, n in shapes] for rank in range(ranks)]
    if on_all:
        return MuonCost(sum(newton_schulz_flops(*shape) for shape in shapes),
                        2 * (ranks - 1) * max(map(sum, own)))
    flops, sent = [0] * ranks, [0] * ranks
    for i, owner in enumerate(muon_owners(shapes, ranks)):
        flops[owner] += newton_schulz_flops(*shapes[i])
        for rank in range(ranks):
            if rank != owner:  # there, and back
                sent[rank] += 2 * own[rank][i]
                sent[owner] += 2 * own[rank][i]
    return MuonCost(max(flops), max(sent))
