"""The check of average_gradients."""

import torch
import torch.distributed as dist

from ranklab.checks.data_parallel.events import Sent, all_ended, all_sent_once
from ranklab.checks.data_parallel.toys import HAND_ON, gradients, off, toy_with_more, weights
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import LEFT, MISMATCH, hinted
from ranklab.checks.trial import explain, group_of_mine, members_of, on_ranks, rank_name
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


def _given(name, shape, rank):
    """The gradient that `rank` has for a parameter: numbers whose sums and means are exact."""
    random = torch.Generator().manual_seed(1000 * rank + sum(map(ord, name)))
    return 12.0 * torch.randint(-99, 100, shape, generator=random)


def _average_trial(average_gradients, in_groups=False):
    group, rank = group_of_mine() if in_groups else None, dist.get_rank()
    model = toy_with_more(rank)  # not equal: averaging weights would show
    before = weights(model)
    for name, p in model.named_parameters():
        if p.requires_grad and not (name in ALL_MISSING and rank == 0):
            p.grad = torch.empty_like(p).copy_(_given(name, p.shape, rank))
    with Traffic() as traffic, Sent() as sent:
        average_gradients(model, group) if in_groups else average_gradients(model)
    _once_more(average_gradients, rank, group)
    moved = [name for name, value in weights(model).items() if not torch.equal(value, before[name])]
    nbytes = sum(op.payload_bytes for op in traffic.ops)
    return gradients(model), moved, nbytes, dict(traffic.calls), sent.ends


def _once_more(average_gradients, rank, group):
    """On another model of the same shapes, which must not touch the gradients of the first."""
    other = toy_with_more(rank)
    for p in other.parameters():
        p.grad = torch.full_like(p, 7.0) if p.requires_grad else None
    average_gradients(other, group)


def check_average_gradients(average_gradients):
    for ranks in (3, 1, 4):
        with hinted(FAILURES):
            seen = on_ranks(_average_trial, average_gradients, ranks=ranks, timeout=LIMIT)
        for rank, (got, moved, _, _, ends) in enumerate(seen):
            all_ended(rank_name(rank, ranks), "all-reduce", *ends)
            _compare_averages(rank_name(rank, ranks), got, moved, range(ranks), rank)
    yield "every gradient is the mean over ranks, on 1, 3, 4 ranks; in two types"
    yield "where a rank has no gradient it counts as zeros; frozen parameters stay without"
    trained = [p for p in toy_with_more(0).parameters() if p.requires_grad]
    for rank, (_, _, sent, calls, _) in enumerate(seen):
        all_sent_once(rank_name(rank, 4), sent, calls, trained, "gradient", "all_reduce",
                      "All-reduce each gradient once, whole. Gathering everybody's gradients costs "
                      "R times the memory.", most=len(trained))
    yield f"one all-reduce for each of {len(trained)} parameters, or fewer; gradients travel once"
    seen = on_ranks(_average_trial, average_gradients, True, ranks=4)
    for rank, (got, *_) in enumerate(seen):
        members = members_of(rank)
        for name in off(got, _averages(members)):
            raise Mistake(f"in the group of ranks {members} the gradient of `{name}` is not the "
                          f"mean of theirs", f"{HAND_ON} And divide by the size of the group: "
                          "dist.get_world_size(group).")
    yield "inside a group it meets nobody else"


def _averages(members):
    return {name: sum(_given(name, p.shape, r) * (r > 0 or name not in ALL_MISSING)
                      for r in members) / len(members)
            for name, p in toy_with_more(0).named_parameters() if p.requires_grad}


def _compare_averages(where, got, moved, members, rank):
    if moved:
        raise Mistake(f"{where}: the weights have changed, `{moved[0]}` first",
                      "Average parameter.grad, not the parameter: the weights are equal already, "
                      "and stay so when equal gradients are added.")
    R, averages = len(members), _averages(members)
    wrong = off(got, averages)
    for name in wrong:
        right, what = averages[name], f"{where}: the gradient of `{name}`"
        if wrong == ["images"]:
            explain(f"{what}, which is channels-last,", got[name], right,
                    hint="Its numbers lie in another order in memory: .contiguous() and "
                    ".reshape(-1) make a copy of it, and the mean must get into parameter.grad "
                    "itself.")
        hint = "Do all ranks divide by the number of ranks, also those that had no gradient?"
        if got[name] is None:
            hint = ("The others have one, so this rank needs the mean as well: make a gradient of "
                    "zeros first.")
        explain(what, got[name], right, {
            f"the sum, {R} times the mean": (
                R * right, "Divide by the number of ranks, or every step is R times too long."),
            "still its own": (_given(name, right.shape, rank), "all_reduce works in place: give "
                              "it parameter.grad itself, not a copy."),
        }, hint)
    frozen = [name for name, grad in got.items() if name.startswith("frozen") and grad is not None]
    if frozen:
        raise Mistake(f"{where}: `{frozen[0]}` is frozen, and now has a gradient",
                      "Skip what does not require a gradient: an optimizer with weight decay would "
                      "move it.")
