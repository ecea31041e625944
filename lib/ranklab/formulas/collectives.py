"""What a collective costs, before it is run: every message takes alpha + n * beta seconds.

alpha (seconds) is the cost of even the smallest message; beta (seconds per byte) is one over the
bandwidth. The model is simplified: links share nothing, a rank sends and receives at the same time,
steps wait for each other, and additions are free. It is wrong in detail but right in shape.
"""

import math
from dataclasses import dataclass

ALGORITHMS = ("ring", "recursive_doubling", "parameter_server", "tree_broadcast")


@dataclass(frozen=True)
class Link:
    """One kind of link: `alpha` seconds a message, `beta` seconds a byte."""

    alpha: float
    beta: float

    def __post_init__(self):
        if self.alpha < 0 or self.beta < 0:
            raise ValueError(f"alpha={self.alpha} and beta={self.beta} must not be negative")


def alpha_beta_time(algorithm, nbytes, ranks, alpha, beta):
    """Return the seconds of `algorithm` for `nbytes` per rank: steps * (alpha + bytes * beta).

    ring: 2(R-1) steps of 1/R of the bytes.
    parameter_server: 2(R-1) steps of all the bytes.
    tree_broadcast: ceil(log2 R) steps of all the bytes.
    recursive_doubling: as tree_broadcast, and one step more if R is not a power of two (the extra
        ranks first send their input to a partner).
    Raises: ValueError for an algorithm that is not in ALGORITHMS.
    Lab: 02
    """
    R, rounds = ranks, math.ceil(math.log2(ranks))
    swaps = rounds if R == 2**rounds else rounds + 1
    costs = {  # steps one after the other, and the bytes of one step
        "ring": (2 * (R - 1), nbytes / R),
        "recursive_doubling": (swaps, nbytes),
        "parameter_server": (2 * (R - 1), nbytes),
        "tree_broadcast": (rounds, nbytes),
    }
    if algorithm not in costs:
        raise ValueError(f"algorithm {algorithm!r} is not one of {', '.join(costs)}")
    steps, step_bytes = costs[algorithm]
    return steps * (alpha + step_bytes * beta)



def crossover_bytes(ranks, alpha, beta):
    """Return the number of bytes at which ring and doubling all-reduce take equally long.

    Above this size the ring wins. The result is not rounded.
    Returns: infinity for 1 or 2 ranks, where doubling sends no more bytes than the ring.
    Lab: 02
    """
    R, rounds = ranks, math.ceil(math.log2(ranks))
    swaps = rounds if R == 2**rounds else rounds + 1
    more_steps = 2 * (R - 1) - swaps  # what the ring pays in alpha
    more_bytes = swaps - 2 * (R - 1) / R  # what doubling pays in beta, per byte of the tensor
    return more_steps * alpha / (more_bytes * beta) if more_bytes > 0 else math.inf


def flat_ring_time(nbytes, nodes, per_node, fast, slow):
    """Return the seconds of a ring all-reduce over all ranks of all nodes.

    Each step waits for its slowest link.
    """
    R = nodes * per_node
    worst = slow if nodes > 1 else fast
    return alpha_beta_time("ring", nbytes, R, worst.alpha, worst.beta)


def hierarchical_time(nbytes, nodes, per_node, fast, slow):
    """Return the seconds of a hierarchical all-reduce.

    The ranks of a node share its one slow link.
    All `per_node` rings across the nodes run at the same time, and together they move
    2(nodes-1)/nodes of the bytes through each node's link.
    """
    inside = alpha_beta_time("ring", nbytes, per_node, fast.alpha, fast.beta)
    return inside + alpha_beta_time("ring", nbytes, nodes, slow.alpha, slow.beta)


def all_to_all_v_time(nbytes, alpha, beta):
    """Return the seconds that the busiest rank takes in all_to_all_v.

    It sends R-1 lengths, then its pieces. It receives at the same time, and at the same speed.
    nbytes: nbytes[i][j] bytes go from rank i to rank j.
    """
    R = len(nbytes)
    messages = [[0 if i == j else n for j, n in enumerate(row)] for i, row in enumerate(nbytes)]
    data = max(sum(alpha + n * beta for n in row if n) for row in [*messages, *zip(*messages)])
    return (R - 1) * (alpha + 8 * beta) + data


def best_sent_bytes(verb, nbytes, ranks):
    """Return the bytes that each rank must send on average with the best possible algorithm.

    nbytes: the larger side of the verb: the whole tensor, not the shard.
    """
    return bus_factor(verb, ranks) * nbytes


def bus_factor(verb, ranks):
    """Return the factor from algorithm to bus bandwidth in nccl-tests.

    It is the number of bytes that one link carries for each byte of the verb.
    Raises: ValueError if the verb has no such factor.
    """
    share = (ranks - 1) / ranks
    factors = {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share,
               "all_to_all": share, "broadcast": 1.0, "reduce": 1.0}
    if verb not in factors:
        raise ValueError(f"verb {verb!r} is not one of {', '.join(factors)}")
    return factors[verb]
