"""The check of sync_batch_norm: against torch's batch norm of the whole batch, in one process."""

import torch
import torch.distributed as dist
from torch.nn.functional import batch_norm

from ranklab.checks.data_parallel.toys import HAND_ON
from ranklab.checks.data_parallel.whole_batch import (
    EPS, C, compare_gradients, compare_values, right_answer, whole_batch,
)
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted
from ranklab.checks.trial import explain, group_of_mine, members_of, on_ranks, rank_name
from ranklab.engine import device
from ranklab.meter import Traffic

CUTS = {1: (6,), 3: (2, 5, 1), 4: (3, 0, 2, 1)}  # rows of each rank; one has none
GROUP_CUTS = {(0,): (3,), (1, 2, 3): (2, 1, 4)}
SHAPES = ((C,), (C, 4, 2))


def _norm_trial(sync_batch_norm, cut, dtype=torch.float64, mean=0.0):
    """What _one sees, for each shape; on 4 ranks also inside the group."""
    rank = dist.get_rank()
    seen = [_one(sync_batch_norm, cut, rank, whole_batch(sum(cut), shape, dtype, mean))
            for shape in SHAPES]
    if len(cut) == 4:
        members = members_of(rank)
        cut = GROUP_CUTS[members]
        seen.append(_one(sync_batch_norm, cut, members.index(rank), whole_batch(sum(cut), (C,)),
                         group=group_of_mine()))
    return seen


def _one(sync_batch_norm, cut, place, batch, **group):
    x, upstream, weight, bias = (each.to(device()) for each in batch)
    x, upstream = x.split(cut)[place].clone(), upstream.split(cut)[place].clone()
    for leaf in (x, weight, bias):
        leaf.requires_grad_()
    if x.dim() == 4:  # in memory by rows, columns and then channels, as images often lie
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    before, upstream_before = x.detach().clone(), upstream.clone()
    running = torch.zeros(C).to(x), torch.ones(C).to(x), 0.1
    with Traffic() as forward:
        y = sync_batch_norm(x, weight, bias, EPS, running=running, **group)
    # Another layer's forward comes before the backward of this one.
    sync_batch_norm(3 * x.detach() + 1, weight.detach(), bias.detach(), EPS, **group)
    with Traffic() as backward:
        y.backward(upstream)
    grads = [None if leaf.grad is None else leaf.grad.cpu() for leaf in (x, weight, bias)]
    return {"y": y.detach().cpu(), "grads": grads, "same": torch.equal(x.detach(), before),
            "same upstream": torch.equal(upstream, upstream_before),
            "running": [part.cpu() for part in running[:2]],
            "calls": [len(forward.ops), len(backward.ops)],
            "verbs": {*forward.calls, *backward.calls},
            "bytes": [sum(op.payload_bytes for op in way.ops) for way in (forward, backward)]}


def check_sync_batch_norm(sync_batch_norm):
    for ranks, cut in CUTS.items():
        with hinted({"ValueError: .*must be at least 2.*": "All ranks together have more: the "
                     "count must be summed over ranks, too."}):
            seen = on_ranks(_norm_trial, sync_batch_norm, cut, ranks=ranks)
        for number, shape in enumerate(SHAPES):
            compare_values([of_rank[number] for of_rank in seen], cut, shape)
        if ranks == 3:
            yield "values of the whole batch's batch norm, on 3 ranks with 2, 5 and 1 rows"
        for number, shape in enumerate(SHAPES):
            compare_gradients([of_rank[number] for of_rank in seen], cut, shape)
    yield "on 1 and 4 ranks too, one of them without a row; with 2 and 4 dimensions"
    yield "the gradient of x too; of weight and bias each rank has its own part"
    for of_rank in seen:
        for got, shape in zip(of_rank, SHAPES):  # the group's come last, and are left out
            _compare_running(got["running"], right_answer(cut, shape)[3])
    yield "mean and variance for evaluation are updated as torch does"
    for rank, of_rank in enumerate(seen):
        for got in of_rank:
            _compare_calls(rank_name(rank, 4), got)
    yield "one all-reduce in forward, one in backward, of a few bytes; x and grad are unchanged"
    for rank, of_rank in enumerate(seen):
        _compare_group(of_rank[-1], members_of(rank), rank)
    yield "inside a group it meets nobody else"
    _far_from_zero(sync_batch_norm)
    yield "in float32 its digits stay, also where the mean is far from zero"
    yield "and large numbers that are all equal give no NaN"
    yield "a weight or bias that is not (C,) is refused with a ValueError"


def _compare_running(got, right):
    explain("the running mean", got[0], right[0],
            hint="mean moves by momentum * (batch's mean - mean), in place.")
    explain("the running variance", got[1], right[1],
            hint="It moves towards the batch's variance with n - 1, not n: variance * n / (n - 1), "
            "n being the count on all ranks.")


def _compare_group(got, members, rank):
    y, of_x, _, _ = right_answer(GROUP_CUTS[members], (C,))
    for what, mine, right in (("y", got["y"], y), ("the gradient of x", got["grads"][0], of_x)):
        explain(f"in the group of ranks {members}, for their batch, {what}", mine,
                right[members.index(rank)], hint=HAND_ON)


def _compare_calls(where, got):
    for calls, sent, enough, way in zip(got["calls"], got["bytes"], (16 * C + 8, 16 * C),
                                        ("forward", "backward")):
        if calls != 1:
            raise Mistake(f"{where}: {calls} collectives in {way}; one is enough",
                          "Put what is to be summed into one tensor with torch.cat: at this size "
                          "a message costs its latency.")
        if got["verbs"] != {"all_reduce"}:
            raise Mistake(f"{where} calls {' and '.join(sorted(got['verbs']))}; asked is one "
                          "all-reduce in forward and one in backward", "An all-reduce adds up "
                          "under way. All-gather hands every rank's sums to everybody: R times the "
                          "bytes.")
        if sent > enough:
            raise Mistake(f"{where}: {sent} bytes in {way}; {enough} are enough", "Two sums a "
                          "channel, once, and in forward the count: no row of x has to travel.")
    if not got["same"]:
        raise Mistake("x itself was changed", "Make a new tensor.")
    if not got["same upstream"]:
        raise Mistake("backward has changed the gradient that it was given", "It may be another "
                      "layer's as well, where y is used twice: grad - ..., not grad -= ...")


def _far_trial(sync_batch_norm, cut, mean):
    """Values far from zero; 64 channels, each of one large number; a weight of the wrong shape."""
    x = (torch.linspace(1e7, 1e8, 64, dtype=torch.float64) / 3).expand(3, 64).to(device())
    constant = sync_batch_norm(x, torch.ones(64).to(x), torch.zeros(64).to(x), EPS)
    try:
        got = sync_batch_norm(x, torch.ones(1).to(x), torch.zeros(1).to(x), EPS)
    except ValueError:
        got = None
    seen = _norm_trial(sync_batch_norm, cut, torch.float32, mean)
    return (*seen, constant.cpu(), None if got is None else tuple(got.shape))


def _far_from_zero(sync_batch_norm):
    cut, mean = (3, 4), 3000.0
    seen = on_ranks(_far_trial, sync_batch_norm, cut, mean, ranks=2)
    for number, shape in enumerate(SHAPES):
        x, _, weight, bias = whole_batch(7, shape, torch.float32, mean)
        right = batch_norm(x.double(), None, None, weight.double(), bias.double(), True, 0, EPS)
        for of_rank, wanted in zip(seen, right.split(cut)):
            if of_rank[number]["y"].dtype != torch.float32:
                raise Mistake("float32 came in, another type went out", "Return x's own type.")
            off = (of_rank[number]["y"] - wanted).abs().max().item()
            if not off < 1e-3:
                what = f"with a mean of {mean:g} and float32 the values are off by {off:.2g}"
                raise Mistake(what, "mean(x * x) - mean(x) ** 2 is a small difference of two large "
                              "numbers. Square and sum in float64: x.double().")
    for *_, constant, accepted in seen:
        nans = int(constant.isnan().any(0).sum())
        if nans:
            raise Mistake(f"of 64 channels, each of one number from 3e6 to 3e7, {nans} are NaN",
                          "mean(x * x) - mean(x) ** 2 comes out a bit below 0 by rounding, and has "
                          "no root then: clamp(min=0).")
        if accepted is not None:
            raise Mistake(f"x (3, 64), weight (1,) and bias (1,) give {accepted}", "Say what is "
                          "wrong, at once: raise ValueError(...) with the shapes in it.")
