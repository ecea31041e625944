"""Muon with shards: Newton-Schulz needs whole matrices, but each rank holds some rows of each.

AdamW treats each number by itself, so a shard is enough. Muon replaces the momentum of a matrix by
a nearly orthogonal matrix, for which all rows are needed: if each rank orthogonalises its own rows,
the rows of different ranks are not orthogonal to each other. Three ways:

                            a rank computes   and sends, of S bytes of matrices
    gather on all ranks     all of it         (R-1)/R S: every rank gets all rows
    owners                  1/R of it         2 (R-1)/R S/R: rows to the owner, and back
    whole from the start    1/R of it         nothing: gradients are reduced to the owner

This is the second way, which leaves the shards unchanged. Messages have 16 bits a number, because
Newton-Schulz rounds to bfloat16 anyway.
"""

import torch
import torch.distributed as dist

from ranklab.engine import device
from ranklab.formulas.muon import muon_owners
from ranklab.ranks import shard_range

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # Jordan et al. 2024: a steep start, and never exact


def newton_schulz(matrix, steps=5):
    """Orthogonalise a matrix roughly, as torch.optim.Muon does; return a new one in bfloat16.

    In U S V^T, the singular values S move to about 1, between 0.5 and 1.5; U and V stay the same.
    Cost: 4 m^2 n + 2 m^3 FLOPs a step, for m x n with m <= n.
    Paper: Jordan et al. 2024, Muon (kellerjordan.github.io/posts/muon)
    """
    a, b, c = COEFFICIENTS
    is_tall = len(matrix) > len(matrix.mT)
    x = matrix.mT.bfloat16() if is_tall else matrix.bfloat16()
    x = x / x.norm().clamp(min=1e-7)  # now no singular value is above 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT.contiguous() if is_tall else x


def exchange_matrices(to_ranks, shapes, group=None):
    """Send the matrices to_ranks[r] to rank r, in bfloat16; return the received ones, in lists.

    shapes: for each rank, a list of the shapes of the matrices received from it.
    Cost: one all-to-all.
    """
    sizes = [[m * n for m, n in of_rank] for of_rank in shapes]
    flat = [x.bfloat16().flatten() for matrices in to_ranks for x in matrices]
    sent = torch.cat([torch.empty(0, dtype=torch.bfloat16, device=device()), *flat])
    received = sent.new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(received, sent, [*map(sum, sizes)],
                           [sum(x.numel() for x in matrices) for matrices in to_ranks],
                           group=group)
    pieces = iter(received.split(sum(sizes, [])))
    return [[next(pieces).view(shape) for shape in of_rank] for of_rank in shapes]


def sharded_muon_step(weights, momenta, shapes, lr, weight_decay=0.1, group=None):
    """Step matrices of which each rank holds some rows, as torch.optim.Muon steps whole matrices.

    Each matrix W with momentum M becomes, in place,
    (1 - lr weight_decay) W - lr max(1, m/n)**0.5 newton_schulz(M). Collective.
    weights, momenta: this rank's rows of each matrix, float32: shard_range(m, rank, R) of m rows.
        The momenta are what torch orthogonalises (Nesterov's), and stay unchanged.
    shapes: (m, n) of each whole matrix, the same on every rank.
    Cost: FLOPs and bytes of the busiest rank, as computed by muon_cost; two all-to-alls.
    Paper: Liu et al. 2025, Muon is scalable for LLM training, 2.3
    Lab: 06
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    owners = muon_owners(shapes, ranks)
    owned = [[i for i, owner in enumerate(owners) if owner == r] for r in range(ranks)]
    parts = [[shard_range(m, r, ranks) for r in range(ranks)] for m, _ in shapes]

    # Rows go to the owner of their matrix, and orthogonal rows come back.
    rows = exchange_matrices([[momenta[i] for i in each] for each in owned],
                             [[(len(parts[i][r]), shapes[i][1]) for i in owned[rank]]
                              for r in range(ranks)], group)
    whole = [newton_schulz(torch.cat(of_ranks)) for of_ranks in zip(*rows)]
    rows = exchange_matrices([[x[parts[i][r].start : parts[i][r].stop]
                               for i, x in zip(owned[rank], whole)] for r in range(ranks)],
                             [[momenta[i].shape for i in each] for each in owned], group)

    for i, update in zip(sum(owned, []), sum(rows, [])):
        m, n = shapes[i]  # of the whole matrix: a shard has fewer rows
        weights[i].mul_(1 - lr * weight_decay).add_(update, alpha=-lr * max(1, m / n) ** 0.5)
