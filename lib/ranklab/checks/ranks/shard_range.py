"""The check of shard_range: compared with numpy's array_split."""

import operator
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch

from ranklab.checks.prover import Proof, Slip, Stage, Told
from ranklab.engine.report import count_ranks
from ranklab.ranks import shard_range

KIND, LENGTHS, PARTS = "what it returns", "the list of the lengths", "what the ranks have"
NUMBERS = "a sequence of whole numbers"


class Case(NamedTuple):
    n: int
    size: int

    def __str__(self):
        return f"n={self.n} on {count_ranks(self.size)}"


def _see(fn, case):
    parts = [fn(case.n, rank, case.size) for rank in range(case.size)]
    kind = next((kind for kind in map(_kind, parts) if kind != NUMBERS), NUMBERS)
    parts = [[*map(operator.index, part)] for part in parts if kind == NUMBERS]
    counts, whole = Counter(sum(parts, [])), range(case.n)
    yield {KIND: Told(kind, lambda got, due: got),
           "what is handed out twice": _told(i for i in counts if counts[i] > 1),
           "what nobody has": _told(i for i in whole if i not in counts),
           "what is not in range(n)": _told(i for i in counts if i not in whole),
           LENGTHS: [*map(len, parts)],
           PARTS: parts}


def _kind(part):
    if not hasattr(part, "__len__"):  # an iterator: once read, it is empty
        return "None" if part is None else f"a {type(part).__name__}, which has no length"
    try:
        [*map(operator.index, part)]
    except TypeError as error:
        return f"a {type(part).__name__} of other things than whole numbers: {error}"
    return NUMBERS


def _told(items):
    return Told(sorted(items), lambda got, due: ", ".join(
        [*map(str, got[:4]), *["..."] * (len(got) > 4)]))


def by_numpy(n, rank, size):
    return np.array_split(np.arange(n), size)[rank]


def by_chunk(n, rank, size):
    return torch.arange(n).chunk(size)[rank]


def the_rest_is_shared_out_again(n, rank, size):
    return [*range(rank * (n // size), (rank + 1) * (n // size)),
            *range(n // size * size + rank, n, size)]


BOTH, BEGIN, END = "divmod(n, size)", "rank * share + min(rank, left_over)", "(rank < left_over)"
WHOLE = f"return range(start, start + share + {END})"
ROUNDED = "(n * {} // size, n * {} // size)"
SHARD_RANGE = Proof(
    shard_range,
    Stage({"range(n) for n = 0, 1, 5, 7, ... on 1, 2, 3, 4, 8 ranks: nothing lost, nothing twice":
           (),
           "lengths differ by at most one, the longer parts first, each part contiguous":
           (LENGTHS, PARTS)},
          _see, tuple(Case(n, size) for n in (10, 7, 5, 8, 24, 1001, 1, 0)
                      for size in (4, 3, 8, 2, 1)), oracle=by_numpy),
    mistakes=(
        Slip("n // size rounds down, so the n % size left-over items are lost. The first n % size "
             "ranks take one more each.", (BOTH, "n // size, 0"), (f" + {END}", "")),
        Slip("-(-n // size) rounds up, so more than n items are handed out. Count the left-over "
             "items: only n % size ranks take one more.", (BOTH, "-(-n // size), 0")),
        Slip("Rounding up fills the first ranks and leaves little or nothing for the last. Lengths "
             "must differ by at most one.",
             (WHOLE, "return range(n)[rank * -(-n // size):(rank + 1) * -(-n // size)]")),
        Slip("chunk() rounds up, so the last parts are short or missing altogether.", by_chunk),
        Slip("Each part must start where the previous rank's part ends. Of the ranks before this "
             "one, min(rank, left_over) took one more each.", (" + min(rank, left_over)", "")),
        Slip("Only the first left_over ranks took one more, so min(rank, left_over) of the ranks "
             "before this one did.", ("min(rank, left_over)", "rank")),
        Slip("Ranks 0 .. left_over - 1 take one more: rank < left_over.",
             ("rank < left_over", "rank <= left_over")),
        Slip("One rank gets all the left-over items, and all others wait for it. Give one item to "
             "each of the first ranks.",
             (WHOLE, "return range(rank * share, n if rank == size - 1 else (rank + 1) * share)"),
             (WHOLE, "return range(rank * share + (rank > 0) * left_over, (rank + 1) * share + "
              "left_over)")),
        Slip("A stride (rank, rank + size, ...) is also a fair split, but files and tensors are "
             "read in blocks: make each part one block.", (WHOLE, "return range(rank, n, size)")),
        Slip("Each part must be one block: the first ranks take one more item, so all later parts "
             "start later.", the_rest_is_shared_out_again),
        Slip("This split is fair, but the first ranks must get the longer parts.",
             (WHOLE, f"return range{ROUNDED.format('rank', '(rank + 1)')}"),
             (WHOLE, "return range(round(n * rank / size), round(n * (rank + 1) / size))"),
             (BEGIN, "rank * share + max(0, rank + left_over - size)",
              END, "(rank >= size - left_over)")),
        Slip("Rank 0 must get the first part: your order is reversed.",
             (BEGIN, "(size - 1 - rank) * share + max(0, left_over - 1 - rank)")),
        Slip("This is (start, end). Return the part itself: range(start, end).",
             (WHOLE, WHOLE.replace("range", ""))),
        Slip("A part must have a length and be readable more than once: return range(start, end).",
             (WHOLE, WHOLE.replace("range", "iter(range") + ")"),
             (WHOLE, WHOLE.replace("range", "(i for i in range") + ")"),
             (WHOLE, WHOLE.replace("range", "slice"))),
        Slip("The function returns None: return range(start, end).", ("return range", "range")),
        Slip("`/` gives a float, even where it divides evenly, and items are whole numbers: use "
             "//.",
             (BOTH, "n / size, n % size"), (BOTH, "n / size // 1, n % size"),
             (BOTH, "n / size // 1, n % size", WHOLE, WHOLE.replace("range", "np.arange")), np=np),
        Slip("range(n) starts at 0: these parts are shifted by one.",
             (WHOLE, WHOLE.replace("start", "start + 1"))),
        Slip("range(start, end) already leaves `end` out: don't subtract anything.",
             (END, f"{END} - 1")),
        Slip("range(start, end) leaves `end` out: the end of a part is where the next one starts.",
             (END, f"{END} + 1")),
        Slip("The second number is where the part ends, not how long it is: start + length.",
             ("start + share", "share")),
    ), hints=(
        "At least how many items does each rank get, and how many are left over?",
        "divmod(n, size) gives both. The first left_over ranks take one more each.",
        "start = rank * share + min(rank, left_over); the length is share + (rank < left_over)."))
