"""Lab 02, recursive_doubling: mistakes that a good student would really make."""

from mutants import mutant

from ranklab.collectives import recursive_doubling, ring_all_reduce

SWAP = "sendrecv(total, rank ^ step, buffer, rank ^ step, group)"
ROUND = "sendrecv(total, (rank + step) % R, buffer, (rank - step) % R, group)"
POWER = "2 ** (R.bit_length() - 1)"

WRONG = [
    mutant(recursive_doubling, POWER, "R", says="R is no power of two here"),
    mutant(recursive_doubling, POWER, "R", SWAP, ROUND, says="Fold the ranks"),
    mutant(recursive_doubling, SWAP, ROUND.replace("R,", "power,"), says="the same two numbers"),
    mutant(recursive_doubling, SWAP, SWAP.replace("buffer", "total"), says="a place of its own"),
    mutant(recursive_doubling, "step *= 2", "step += 1", says="Too many swaps"),
    mutant(recursive_doubling, "    rank, R =", "    group = None\n    rank, R =",
           says="Pass `group` on"),
    mutant(recursive_doubling, "    power =",
           "    if R & R - 1:\n        return ring_all_reduce(x, group)\n    power =",
           says="Three ranks hand x over", ring_all_reduce=ring_all_reduce),
]


def recursive_doubling__is_a_ring(x, group=None):
    """log2 R swaps of the whole tensor"""
    return ring_all_reduce(x, group)
