"""Lab 08: what goes wrong with seeds."""

import random

import torch
from mutants import mutant

from ranklab.tensor_parallel import dropout_seeds

FIRST = "seed * SPREAD + data_rank * (tensor_ranks + 1)"
OWN = "first + 1 + tensor_rank"


def _wrong(*edits, says, **named):
    return mutant(dropout_seeds, *edits, says=says, torch=torch, random=random, **named)


WRONG = [
    _wrong(FIRST, "seed + data_rank * (tensor_ranks + 1)", says="up to the next seed"),
    _wrong("seed * SPREAD", "seed * 1000", says="room for all of them", called="runs_too_close"),
    _wrong(FIRST, "seed * SPREAD", says="tensor_ranks \\+ 1 for each data rank"),
    _wrong(FIRST, "seed * SPREAD + data_rank * tensor_ranks", says="are the same number",
           called="one_too_few"),
    _wrong(OWN, "first + tensor_rank", says="are the same number", called="rank_0_has_the_shared"),
    _wrong(OWN, "first + 1", says="are the same number", called="own_is_alike"),
    _wrong("return first,", "return first + tensor_rank,", says="shared is not that of|same number",
           called="shared_is_not"),
    _wrong(OWN, "torch.randint(2**31, ()).item()", says="generator is changed"),
    _wrong(OWN, "random.getrandbits(40)", says="other seeds in a second call"),
    _wrong(f"return first, {OWN}", f"return torch.tensor(first), torch.tensor({OWN})",
           says="Two integers"),
    _wrong(FIRST, "(seed * SPREAD + data_rank * (tensor_ranks + 1)) * 2**60", says="Two integers",
           called="too_large"),
    _wrong(FIRST, "seed * SPREAD + data_rank + tensor_ranks", says="are the same number",
           called="added_up"),
]
