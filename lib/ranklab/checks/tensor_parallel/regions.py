"""The checks of copy_to_region and reduce_from_region: a sum over ranks, one way only."""

import torch

from ranklab.checks.beside import on_groups
from ranklab.checks.tensor_parallel.one_process import FAILURES, Whole, as_one_process, seeded

CASES = ("float32", "float64", "bfloat16", "transposed", "x needs no gradient",
         "x is used outside, too")
NO_HOOK = {"RuntimeError: cannot register a hook on a tensor that doesn't require gradient":
    "x may need no gradient, as behind a frozen "
            "embedding: then backward has nothing to sum."}
COPY = {"value": "x is on each rank already: forward sends nothing, and x goes on as it is.",
        "x": "Each rank knows a part of the gradient: backward sums what comes from inside over "
        "ranks, once. A hook on x itself sees the gradients from outside, too: hook x.view_as(x), "
        "or write an autograd.Function."}
REDUCE = {"value": "The ranks' x are parts of one sum: all_reduce, no mean.",
          "x": "Outside all ranks have the same gradient, so backward passes it on as it is. "
          "(torch.distributed.nn's all_reduce sums it again: there each rank has its own loss.)"}


def _cases(rows):
    for seed, case in enumerate(CASES):
        x = seeded(seed, rows, 3, 3, dtype=case if case in CASES[:3] else "float32")
        yield case, (x.mT if case == "transposed" else x).requires_grad_("no" not in case)


def _copy(copy_to_region, ranks):
    """Columns r of the value are what rank r reads; the last ones are x outside, if it is."""
    for case, x in _cases(1):
        whole, outside = Whole(x), range("outside" in case)
        mine, at = whole.leaf(), ranks.at(ranks.size)
        at = torch.cat([at, *[torch.full_like(at, ranks.size) for _ in outside]])
        yield from as_one_process(
            case, ranks,
            lambda: torch.cat([copy_to_region(mine, ranks.group), *[2 * mine for _ in outside]]),
            {"x": mine}, lambda: torch.cat([*[x] * ranks.size, *[2 * x for _ in outside]]),
            {"x": whole}, Whole(None, 0, at), COPY, (), (x.nbytes,))


def _reduce(reduce_from_region, ranks):
    """Row r of x is on rank r."""
    for case, x in _cases(ranks.size):
        whole = Whole(x, 0, ranks.at(ranks.size))
        mine = whole.leaf()
        yield from as_one_process(
            case, ranks, lambda: reduce_from_region(mine, ranks.group), {"x": mine},
            lambda: x.sum(0, keepdim=True), {"x": whole}, Whole(None), REDUCE, (mine.nbytes,))


def check_copy_to_region(copy_to_region):
    on_groups(_copy, copy_to_region, failures=NO_HOOK | FAILURES)
    yield "x as it is; backward one all-reduce: the sum of the gradients, on 4, 3, 2 and 1 ranks"
    yield "x may be used outside, too, be transposed, or need no gradient; any type"
    yield "two backwards add up; x and the gradients stay unchanged"


def check_reduce_from_region(reduce_from_region):
    on_groups(_reduce, reduce_from_region, failures=NO_HOOK | FAILURES)
    yield "one all-reduce: the sum over 4, 3, 2 and 1 ranks; backward sends nothing"
    yield "x may need no gradient; any type"
    yield "two backwards add up; x and the gradients stay unchanged"
