"""The check of compress_fp16_hook: registered in torch's own DDP."""

import torch
import torch.distributed as dist

from ranklab.checks.ddp.given import COUNT, gradients_of, mean_of, steps_in_ddp
from ranklab.checks.ddp.refusals import BACK, check_signature, run_in_ddp
from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import GROUPS, group_of_mine

KINDS = ("normal", "normal", "normal", "large", "uneven")
PRECISION = 7e-4  # float16: about 3e-4 of the gradient's length; bfloat16: 2e-3


def check_compress_fp16_hook(fn):
    check_signature(fn)
    for ranks in (2, 3, 1):
        seen = run_in_ddp(steps_in_ddp, None, fn, KINDS[:3], ranks=ranks)
        _shares_nothing(seen)
        _values(seen, range(ranks), KINDS[:3])
    yield "in torch's DDP every rank ends with the mean, to float16's precision; 1, 2, 3 ranks"
    seen, in_groups = zip(*run_in_ddp(_four, fn, ranks=4))
    _values(seen, range(4), KINDS[:3])
    _bytes(seen)
    _returns_at_once(seen)
    yield "one all-reduce of half the bytes for each bucket, and backward does not wait for it"
    _values(seen, range(4), KINDS)
    yield ("nothing overflows: 40,000 on each of 4 ranks stays 40,000; 100,000 on one of them is "
           "25,000")
    for members in GROUPS[::-1]:
        _values([in_groups[rank] for rank in members], members, KINDS[:1],
                f"in the group of ranks {members}, ")
    yield "inside a group it meets nobody else"


def _four(fn):
    """Runs on four ranks: steps of all, and of two groups."""
    group = group_of_mine()
    return steps_in_ddp(None, fn, KINDS), steps_in_ddp(group, fn, KINDS[:1], group)


def _values(seen, ranks, kinds, where=""):
    """`seen` is of the ranks `ranks`, in this order."""
    for step, kind in enumerate(kinds):
        right = mean_of(ranks, step, kind)
        for rank, steps in zip(ranks, seen):
            if _distance(steps[step].gradient, right) > PRECISION:
                raise _wrong(steps[step].gradient, right, f"{where}on rank {rank} of {len(seen)}",
                             kind, ranks, step)
        if any(not torch.equal(steps[step].gradient, seen[0][step].gradient) for steps in seen):
            raise Mistake(f"{where}the {len(seen)} ranks end with different gradients",
                          "Every rank must end with what the all-reduce gave.")


def _distance(got, right):
    return ((got.double() - right).norm() / right.norm()).item()


def _wrong(got, right, place, kind, ranks, step):
    if kind == "large":
        return Mistake(f"{place} a gradient of 40,000 became {got[0]:g}",
                       "float16 ends at 65,504, and the sum of 4 ranks is 160,000. Divide by the "
                       "number of ranks before the all-reduce, not after it.")
    if kind == "uneven":
        return Mistake(f"{place} 100,000 on one rank and 0 on the others became {got[0]:g}, not "
                       f"{right[0]:,.0f}",
                       "100,000 is infinite in float16: divide before the cast.")
    i = int((got - right).abs().argmax())
    what = f"{place} gradient {i} is {got[i]:.4f} where {right[i]:.4f} is right"
    share = ((got - right).abs() < 5e-3).double().mean().item()
    if len(ranks) > 1 and step and share > 0.1:
        return Mistake(f"{what}; {share:.0%} of the gradients are right", "From its second step on "
                       "DDP has several buckets here, and calls the hook for each: all must be "
                       "averaged, and none may wait for another, or share anything with it.")
    for wrong, name, hint in _slips(right, ranks, step) if len(ranks) > 1 else ():
        if _distance(got, wrong) < 0.05:
            return Mistake(f"{what}{name}", hint)
    if ranks in GROUPS[1:]:
        return Mistake(what, "The hook's first argument is the group: hand it to "
                       "get_world_size(group) and to all_reduce(..., group=group).")
    return Mistake(what, f"Asked is the sum over ranks of what each has divided by their number. "
                         f"{BACK}")


def _slips(right, ranks, step):
    """(what a usual mistake gets, its name, a hint)."""
    R = len(ranks)
    yield R * right, ": the sum, not the mean", ("DDP averages by itself only without a hook. "
                                                 "Divide by dist.get_world_size(group).")
    yield right / R, f": 1/{R} of it", ("Divided by the ranks twice? Once is the mean. Or by the "
                                        "ranks of another group: ask dist.get_world_size(group).")
    yield right, "", "That is bfloat16's precision, or less; torch.float16 is asked."
    own = [gradients_of(rank, step, "normal") / factor for rank in ranks for factor in (1, R)]
    for mine in own:
        yield mine, ": this rank still has its own", BACK
    for mine in own:
        yield right + mine, ": its own is in it twice", ("copy_ the mean into the buffer, don't "
                                                         "add it.")


def _shares_nothing(seen):
    if any(step.shared for steps in seen for step in steps):
        raise Mistake("two buckets of one backward travel in the same memory", "DDP has several "
                      "buckets, and the next one comes while this one is under way: .to(...) makes "
                      "a new tensor for each.")


def _returns_at_once(seen):
    if any(step.waited for steps in seen for step in steps):
        raise Mistake("the hook waits for the all-reduce before it returns",
                      "So backward stands still until the network is done. "
                      "dist.all_reduce(..., async_op=True).get_future() waits for nothing; what "
                      "comes after the all-reduce goes into .then(...).")


def _bytes(seen):
    whole = 2 * 3 * 4 * COUNT  # float32, all ranks together
    for of_ranks in zip(*seen):
        calls, buckets = of_ranks[0].calls, of_ranks[0].buckets
        sent = sum(one.bytes for one in of_ranks)
        if set(calls) != {"all_reduce"}:
            raise Mistake(f"it calls {', '.join(sorted(calls)) or 'nothing'}",
                          "One all_reduce does it.")
        if calls["all_reduce"] > buckets:
            raise Mistake(f"{calls['all_reduce']} all-reduces for {buckets} "
                          f"bucket{'s' * (buckets > 1)}", "One message for the whole bucket: "
                          "narrow bucket.buffer(), and not each gradient by itself.")
        if sent != whole / 2:
            raise Mistake(f"its traffic is {sent / whole:.0%} of float32's, not 50%",
                          "Cast before the all-reduce, once, and cast back after it.")
