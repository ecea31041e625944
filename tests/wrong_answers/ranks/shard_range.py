"""Lab 00: what goes wrong when the work is cut into parts."""

import numpy as np
from mutants import mutant

from ranklab.ranks import shard_range

WHOLE = "return range(start, start + share + (rank < left_over))"

WRONG = [
    mutant(shard_range, "divmod(n, size)", "n // size, 0", says="left-over n % size"),
    mutant(shard_range, "divmod(n, size)", "-(-n // size), 0", says="ends before"),
    mutant(shard_range, " + min(rank, left_over)", "", says="handed out twice"),
    mutant(shard_range, WHOLE,
           "return range(rank * share, n if rank == size - 1 else (rank + 1) * share)",
           says="may differ by one at most"),
    mutant(shard_range, WHOLE, "return range(rank, n, size)", says="not contiguous"),
    mutant(shard_range, WHOLE, "return range(n * rank // size, n * (rank + 1) // size)",
           says="longer parts belong to the first ranks"),
    mutant(shard_range, "return range(start,", "return (start,", says="Return the part itself"),
    mutant(shard_range, WHOLE, WHOLE.replace("range", "iter(range") + ")",
           says="can be read twice"),
    mutant(shard_range, "divmod(n, size)", "n / size // 1, n % size", "range(start", "np.arange("
           "start", says="not whole numbers", np=np),
    mutant(shard_range, "range(start, start", "range(start + 1, start + 1",
           says="parts are shifted"),
]
