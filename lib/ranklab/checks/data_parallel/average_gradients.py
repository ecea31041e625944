"""The check of average_gradients: beside the mean of gradients that are known."""

from functools import partial

import torch
import torch.distributed as dist

from ranklab.checks.beside import beside, on_groups
from ranklab.checks.data_parallel.sent import Sent, all_sent_once
from ranklab.checks.data_parallel.toys import toy_with_more
from ranklab.checks.failures import LEFT, MISMATCH
from ranklab.meter import Traffic

MISSING = "wide.weight", "first.bias", "twice.bias"  # on rank 0; two are of one shape and type
LIMIT = 5  # seconds; a rank that skips a parameter waits for ever
SKIPPED = (f"`{MISSING[0]}` has no gradient on rank 0, and has one on the others. All ranks must "
           "call the same all-reduces, in the same order: put zeros there.")
FAILURES = {
    "RuntimeError: attempting to assign a gradient .*": f"`{MISSING[0]}` is in float64: "
    "torch.zeros_like(parameter) has type, shape and device.", MISMATCH: SKIPPED, LEFT: SKIPPED,
    "AttributeError: 'NoneType' object has no attribute '.*'": SKIPPED,
}
HINTS = {  # by a part of the name; the last one fits all
    "frozen": "Skip parameters that need no gradient: an optimizer with weight decay would move "
              "them.",
    "images": "This gradient is channels-last, so .contiguous() makes a copy, and the mean must "
              "get into parameter.grad itself.",
    "gradient": "All ranks need the mean, and all divide by the number of ranks: make a gradient "
    "of zeros where there is none.",
    "": "Average parameter.grad, not the parameter: the weights are equal already, and stay so "
    "when equal gradients are added.",
}


def _given(name, p, rank, turn):
    """The gradient that `rank` has for a parameter: numbers whose sums and means are exact."""
    random = torch.Generator().manual_seed(1000 * rank + 7 * turn + sum(map(ord, name)))
    return 12.0 * torch.randint(-99, 100, p.shape, generator=random).to(p.dtype)


def _trial(average_gradients, ranks):
    rank, noted = dist.get_rank(), []
    before = dict(toy_with_more(rank).named_parameters())
    trained = [p for p in before.values() if p.requires_grad]

    def call(turn):
        model = toy_with_more(rank)  # not equal: averaging weights would show
        for name, p in model.named_parameters():
            if p.requires_grad and not (rank == 0 and name in MISSING):
                p.grad = torch.empty_like(p).copy_(_given(name, p, rank, turn))
        with Traffic() as traffic, Sent() as sent:
            average_gradients(model, **ranks.keywords)
        noted.append((traffic, sent))
        return {f"`{name}`": p for name, p in model.named_parameters()} | {
            f"the gradient of `{name}`": p.grad for name, p in model.named_parameters()}

    def right(turn):
        means = {name: sum(_given(name, p, r, turn) * (r > 0 or name not in MISSING)
                           for r in ranks.members) / ranks.size
                 for name, p in before.items() if p.requires_grad}
        return {f"`{name}`": [p] * ranks.size for name, p in before.items()} | {
            f"the gradient of `{name}`": [means.get(name)] * ranks.size for name in before}

    def own(turn):
        return {f"the gradient of `{name}`": _given(name, p, rank, turn)
                for name, p in before.items()}

    looks = list(beside(str(ranks), ranks, call, right, own=own, advice=lambda name: next(
        hint for part, hint in HINTS.items() if part in name)))
    yield partial(noted[0][1].all_ended, str(ranks))
    yield from looks
    yield partial(all_sent_once, str(ranks), noted[0][0], toy_with_more(0), trained, "all_reduce")


def check_average_gradients(average_gradients):
    on_groups(_trial, average_gradients, failures=FAILURES, timeout=LIMIT)
    yield "every gradient is the mean over ranks, on 1, 2, 3, 4 ranks; in two types"
    yield "where a rank has no gradient, it counts as zeros; frozen parameters get none"
    yield ("at most one all-reduce for each parameter; gradients travel once, and every handle is "
           "waited for")
    yield "inside a group it talks to nobody outside"
