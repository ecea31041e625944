"""The check of compress_fp16_hook: registered in torch's own DDP."""

import inspect

import torch
import torch.distributed as dist

from ranklab.checks.ddp.given import SHAPES, gradients_of, mean_of, steps_in_ddp
from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import GROUPS, group_of_mine, on_ranks

KINDS = ("normal", "normal", "normal", "large", "uneven")
COUNT = sum(torch.Size(shape).numel() for shape in SHAPES)
PRECISION = 7e-4  # float16: about 3e-4 of the gradient's length; bfloat16: 2e-3
WHOLE = "One message for the whole bucket: narrow bucket.buffer(), and not each gradient by itself."
BACK = ("Does the result get back? DDP takes what the future holds: in .then(...) copy it into "
        "bucket.buffer(), and return that buffer.")
LIST = "A finished future's value() is a list of one tensor: take value()[0]; return the buffer."
FUNCTION = ("Give .then(...) a function, and not what it returns: it is called when the sum is "
            "there.")
OF_DDP = (  # a part of what DDP or Python says, and what it means here
    ("must return a torch.futures.Future", "DDP wants a future, and gets something else",
     "dist.all_reduce(..., async_op=True).get_future() is one, and so is what its .then(...) "
     "returns. DDP goes on with backward meanwhile."),
    ("expected the hook result is a PyObject",
     "the future that DDP gets holds the all-reduce's list, not the bucket", BACK),
    ("Expected a proper Tensor but got None", "what runs in .then(...) returns None", BACK),
    ("must be Tensor, not list", "in .then(...) a list is taken for a tensor", LIST),
    ("Unable to cast [tensor(", "what runs in .then(...) returns a list", LIST),
    ("'NoneType' object has no attribute 'get_future'", "dist.all_reduce returns None here",
     "With async_op=True it returns at once, with a Work, whose get_future() is asked."),
    ("completed() INTERNAL ASSERT", "value() is asked of a future that is not done", FUNCTION),
    ("then(): incompatible function arguments", ".then(...) gets no function", FUNCTION),
    ("'NoneType' object has no attribute 'size'", "the group is None here, which has no size()",
     "register_comm_hook(None, hook) means all ranks: dist.get_world_size(group) takes None."),
)


def check_compress_fp16_hook(fn):
    _signature(fn)
    for ranks in (2, 3, 1):
        seen = _run(steps_in_ddp, None, fn, KINDS[:3], ranks=ranks)
        _shares_nothing(seen)
        _values(seen, range(ranks), KINDS[:3])
    yield "in torch's DDP every rank ends with the mean, to float16's precision; 1, 2, 3 ranks"
    seen, in_groups = zip(*_run(_four, fn, ranks=4))
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


def _run(trial, *args, ranks):
    try:
        return on_ranks(trial, *args, ranks=ranks)
    except Mistake as mistake:  # DDP's own messages are of C++
        for part, what, hint in OF_DDP:
            if part in mistake.what:
                raise Mistake(what, hint) from None
        raise


def _four(fn):
    """Runs on four ranks: steps of all, and of two groups."""
    group = group_of_mine()
    return steps_in_ddp(None, fn, KINDS), steps_in_ddp(group, fn, KINDS[:1], group)


def _signature(fn):
    names = inspect.signature(fn).parameters
    if "bucket" not in names or names["bucket"].annotation not in (dist.GradBucket,
                                                                   inspect.Parameter.empty):
        raise Mistake(f"DDP refuses it: its parameters are {', '.join(map(str, names.values()))}",
                      "The second one must be called bucket, and annotated dist.GradBucket.")


def _values(seen, ranks, kinds, where=""):
    """`seen` is of the ranks `ranks`, in this order."""
    for step, kind in enumerate(kinds):
        right = _flat(mean_of(ranks, step, kind))
        for rank, steps in zip(ranks, seen):
            place = f"{where}on rank {rank} of {len(seen)}"
            _compare(_flat(steps[step].gradients), right, place, kind, ranks, step)
        for steps in seen:
            if not torch.equal(_flat(steps[step].gradients), _flat(seen[0][step].gradients)):
                raise Mistake(f"{where}the {len(seen)} ranks end with different gradients",
                              "Every rank must end with what the all-reduce gave.")


def _flat(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients])


def _distance(got, right):
    return ((got.double() - right).norm() / right.norm()).item()


def _compare(got, right, place, kind, ranks, step):
    if kind == "large" and _distance(got, right) > PRECISION:
        raise Mistake(f"{place} a gradient of 40,000 became {got[0]:g}",
                      "float16 ends at 65,504, and the sum of 4 ranks is 160,000. Divide by the "
                      "number of ranks before the all-reduce, not after it.")
    if kind == "uneven" and _distance(got, right) > PRECISION:
        raise Mistake(f"{place} 100,000 on one rank and 0 on the others became {got[0]:g}, not "
                      f"{right[0]:,.0f}",
                      "100,000 is infinite in float16: divide before the cast.")
    if _distance(got, right) > PRECISION:
        R = len(ranks)
        i = int((got - right).abs().argmax())
        what = f"{place} gradient {i} is {got[i]:.4f} where {right[i]:.4f} is right"
        raise Mistake(*_name(got, right, what, ranks, step) if R > 1 else (what, BACK))


def _name(got, right, what, ranks, step):
    """(what, hint) for gradients that are wrong."""
    R = len(ranks)
    share = ((got - right).abs() < 5e-3).double().mean().item()
    if step and share > 0.1:
        return f"{what}; {share:.0%} of the gradients are right", (
            "From its second step on DDP has several buckets here, and calls the hook for each: "
            "all must be averaged, and none may wait for another, or share anything with it.")
    if _distance(got, R * right) < 0.05:
        return f"{what}: the sum, not the mean", ("DDP averages by itself only without a hook. "
                                                  "Divide by dist.get_world_size(group).")
    if _distance(got, right / R) < 0.05:
        return f"{what}: 1/{R} of it", ("Divided by the ranks twice? Once is the mean. Or by the "
                                        "ranks of another group: ask dist.get_world_size(group).")
    if _distance(got, right) < 0.05:
        return what, "That is bfloat16's precision, or less; torch.float16 is asked."
    own = [_flat(gradients_of(rank, step, "normal")) for rank in ranks]
    if any(_distance(got, factor * mine) < 0.05 for mine in own for factor in (1, 1 / R)):
        return f"{what}: this rank still has its own", BACK
    if any(_distance(got - factor * mine, right) < 0.05 for mine in own for factor in (1, 1 / R)):
        return f"{what}: its own is in it twice", "copy_ the mean into the buffer, don't add it."
    if ranks in GROUPS:
        return what, ("The hook's first argument is the group: hand it to get_world_size(group) "
                      "and to all_reduce(..., group=group).")
    return what, f"Asked is the sum over ranks of what each has divided by their number. {BACK}"


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
    for step in range(len(KINDS)):
        sent = sum(steps[step].bytes for steps in seen)
        calls = seen[0][step].calls
        if set(calls) != {"all_reduce"}:
            raise Mistake(f"it calls {', '.join(sorted(calls)) or 'nothing'}",
                          "One all_reduce does it.")
        if calls["all_reduce"] > seen[0][step].buckets:
            buckets = seen[0][step].buckets
            raise Mistake(f"{calls['all_reduce']} all-reduces for {buckets} "
                          f"bucket{'s' * (buckets > 1)}",
                          WHOLE)
        if sent != whole / 2:
            raise Mistake(f"its traffic is {sent / whole:.0%} of float32's, not 50%",
                          "Cast before the all-reduce, once, and cast back after it.")
