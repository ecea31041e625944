"""The check of average_gradients: beside the mean of gradients that are known."""

from functools import partial

import torch
import torch.distributed as dist

from ranklab.checks.beside import beside, on_groups
from ranklab.checks.data_parallel.events import Sent, all_ended, all_sent_once
from ranklab.checks.data_parallel.toys import toy_with_more
from ranklab.checks.failures import LEFT, MISMATCH
from ranklab.meter import Traffic

MISSING = "wide.weight"  # has no gradient on rank 0; in float64
ALL_MISSING = MISSING, "first.bias", "twice.bias"  # two of them are of one shape and type
LIMIT = 5  # seconds; a rank that skips a parameter waits for ever
SKIPPED = (f"`{MISSING}` has no gradient on rank 0, where its layer was skipped, and has one on "
           "the others. All ranks must call the same all-reduces, in the same order: put zeros "
           "there.")
FAILURES = {
    "RuntimeError: attempting to assign a gradient .*": f"`{MISSING}` is in float64: "
    "torch.zeros_like(parameter) has type, shape and device.", MISMATCH: SKIPPED, LEFT: SKIPPED,
    "AttributeError: 'NoneType' object has no attribute '.*'": SKIPPED,
}


def _given(name, p, rank, turn):
    """The gradient that `rank` has for a parameter: numbers whose sums and means are exact."""
    random = torch.Generator().manual_seed(1000 * rank + 7 * turn + sum(map(ord, name)))
    return 12.0 * torch.randint(-99, 100, p.shape, generator=random).to(p.dtype)


def _averages(members, turn):
    """{name: the mean}: where a rank has no gradient it counts as zeros."""
    return {name: sum(_given(name, p, r, turn) * (r > 0 or name not in ALL_MISSING)
                      for r in members) / len(members)
            for name, p in toy_with_more(0).named_parameters() if p.requires_grad}


def _trial(average_gradients, ranks):
    rank, noted = dist.get_rank(), []

    def call(turn):
        model = toy_with_more(rank)  # not equal: averaging weights would show
        for name, p in model.named_parameters():
            if p.requires_grad and not (rank == 0 and name in ALL_MISSING):
                p.grad = torch.empty_like(p).copy_(_given(name, p, rank, turn))
        with Traffic() as traffic, Sent() as sent:
            average_gradients(model, **ranks.keywords)
        noted.append((traffic, sent))
        return {f"`{name}`": p for name, p in model.named_parameters()} | {
            f"the gradient of `{name}`": p.grad for name, p in model.named_parameters()}

    def right(turn):
        means = _averages(ranks.members, turn)
        each = dict(toy_with_more(rank).named_parameters())
        each["images"] = each.pop("images")  # last: what all get wrong is not about its strides
        return {f"`{name}`": [p] * ranks.size for name, p in each.items()} | {
            f"the gradient of `{name}`": [means.get(name)] * ranks.size for name in each}

    def own(turn):
        return {f"the gradient of `{name}`": _given(name, p, rank, turn)
                for name, p in toy_with_more(rank).named_parameters()}

    looks = list(beside(str(ranks), ranks, call, right, own=own, advice=_advice))
    yield partial(all_ended, str(ranks), "all-reduce", *noted[0][1].ends)
    yield from looks
    yield partial(_travels_once, str(ranks), noted[0][0])


def _advice(name):
    if "gradient" not in name:
        return ("Average parameter.grad, not the parameter: the weights are equal already, and "
                "stay so when equal gradients are added.")
    if "frozen" in name:
        return ("Skip what does not require a gradient: an optimizer with weight decay would move "
                "it.")
    if "images" in name:
        return ("It is channels-last: .contiguous() and .reshape(-1) make a copy, and the mean "
                "must get into parameter.grad itself.")
    return ("Do all ranks divide by the number of ranks, also those that had no gradient? All "
            "need the mean: make a gradient of zeros where there is none.")


def _travels_once(where, traffic):
    trained = [p for p in toy_with_more(0).parameters() if p.requires_grad]
    nbytes = sum(op.payload_bytes for op in traffic.ops)
    all_sent_once(where, nbytes, dict(traffic.calls), trained, "gradient", "all_reduce",
                  "All-reduce each gradient once, whole. Gathering all gradients costs R times the "
                  "memory.", most=len(trained))


def check_average_gradients(average_gradients):
    on_groups(_trial, average_gradients, failures=FAILURES, timeout=LIMIT)
    yield "every gradient is the mean over ranks, on 1, 2, 3, 4 ranks; in two types"
    yield "where a rank has no gradient it counts as zeros; frozen parameters stay without"
    yield "at most one all-reduce for each parameter; gradients travel once; all is waited for"
    yield "inside a group it meets nobody else"
