"""Checks of average_gradients and assign_buckets."""

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.data_parallel.replicas import GROUP, two_groups
from ranklab.checks.data_parallel.toys import gradients, toy, weights
from ranklab.course.exercise import Mistake, on_ranks
from ranklab.meter import Traffic

MISSING = "wide.weight"  # has no gradient on rank 0; in float64
LIMIT = 5  # seconds; who skips a parameter waits for ever


def _given(name, shape, rank):
    """The gradient that `rank` has for a parameter, as a function of both."""
    random = torch.Generator().manual_seed(1000 * rank + sum(map(ord, name)))
    return torch.randn(shape, generator=random)


def _average_trial(average_gradients, in_groups=False):
    group, rank = two_groups() if in_groups else None, dist.get_rank()
    model = toy(rank)  # not equal, so that it shows when weights are averaged
    before = weights(model)
    for name, p in model.named_parameters():
        if p.requires_grad and not (name == MISSING and rank == 0):
            p.grad = _given(name, p.shape, rank).to(p)
    with Traffic() as traffic:
        average_gradients(model, group) if in_groups else average_gradients(model)
    moved = [name for name, value in weights(model).items() if not torch.equal(value, before[name])]
    sent = sum(op.payload_bytes for op in traffic.ops)
    return gradients(model), moved, sent, dict(traffic.calls)


def check_average_gradients(average_gradients):
    for ranks in (3, 1, 4):
        try:
            seen = on_ranks(_average_trial, average_gradients, ranks=ranks, timeout=LIMIT)
        except Mistake as mistake:
            raise Mistake(mistake.what, _average_hint(mistake)) from None
        for rank, (got, moved, _, _) in enumerate(seen):
            _compare_averages(f"rank {rank} of {ranks}", got, moved, range(ranks), rank)
    yield "every gradient is the mean over ranks, on 1, 3, 4 ranks; in two types"
    yield "where a rank has no gradient it counts as zeros; frozen parameters stay without"
    trained = [p for p in toy(0).parameters() if p.requires_grad]
    wanted = sum(p.nbytes for p in trained)
    for rank, (_, _, sent, calls) in enumerate(seen):
        if (sent != wanted or set(calls) != {"all_reduce"}
                or calls["all_reduce"] > len(trained)):
            hint = ("All-reduce each gradient once, whole. Gathering everybody's gradients costs R "
                    "times the memory.")
            if sent < wanted:
                hint = "Each gradient travels in its own type: in float32 a double loses digits."
            raise Mistake(f"rank {rank} of 4 puts {sent:,} bytes into {calls}; {wanted:,} bytes in "
                          f"{len(trained)} all-reduces are enough", hint)
    yield f"one all-reduce for each of {len(trained)} parameters, or fewer; gradients travel once"
    seen = on_ranks(_average_trial, average_gradients, True, ranks=4)
    for rank, (got, _, _, _) in enumerate(seen):
        members = (rank % 2, rank % 2 + 2)
        for name, right in _averages(members).items():
            if not _near(got[name], right):
                raise Mistake(f"in the group of ranks {members[0]} and {members[1]} the gradient "
                              f"of `{name}` is not the mean of these two",
                              f"{GROUP} And divide by the size of the group: "
                              "dist.get_world_size(group).")
    yield "inside a group it meets nobody else"


def _average_hint(mistake):
    """The failure is about the missing gradient, or it speaks for itself."""
    if "assign" in mistake.what:
        return f"`{MISSING}` is in float64: torch.zeros_like(parameter) has type, shape and device."
    if not any(part in mistake.what for part in ("NoneType", "does not end", "onnection", "killed",
                                                  "mismatch", "expected size")):
        return mistake.hint
    return (f"`{MISSING}` has no gradient on rank 0, where its layer was skipped, and has one on "
            "the others. All ranks must call the same all-reduces, in the same order: put zeros "
            "there.")


def _averages(members):
    right = {}
    for name, p in toy(0).named_parameters():
        if p.requires_grad:
            ours = [_given(name, p.shape, r) for r in members if (name, r) != (MISSING, 0)]
            right[name] = (sum(ours) / len(members)).to(p.dtype) if ours else torch.zeros_like(p)
    return right


def _near(got, right):
    return got is not None and got.shape == right.shape and torch.allclose(got, right, atol=1e-6)


def _compare_averages(where, got, moved, members, rank):
    if moved:
        raise Mistake(f"{where}: the weights have changed, `{moved[0]}` first",
                      "Average parameter.grad, not the parameter: the weights are equal already, "
                      "and stay so when equal gradients are added.")
    R = len(members)
    for name, right in _averages(members).items():
        if _near(got[name], right):
            continue
        if got[name] is None:
            raise Mistake(f"{where}: `{name}` has no gradient", "The others have one, so this rank "
                          "needs the mean as well: make a gradient of zeros first.")
        if _near(got[name], right * R):
            raise Mistake(f"{where}: the gradient of `{name}` is the sum, {R} times the mean",
                          "Divide by the number of ranks, or every step is R times too long.")
        if _near(got[name], _given(name, right.shape, rank).to(right)):
            raise Mistake(f"{where}: the gradient of `{name}` is still its own",
                          "all_reduce works in place: give it parameter.grad itself, not a copy.")
        raise Mistake(f"{where}: the gradient of `{name}` is not the mean over ranks", "Do all "
                      "ranks divide by the number of ranks, also those that had no gradient?")
    frozen = [name for name, grad in got.items() if name.startswith("frozen") and grad is not None]
    if frozen:
        raise Mistake(f"{where}: `{frozen[0]}` is frozen, and now has a gradient",
                      "Skip what does not require a gradient: an optimizer with weight decay would "
                      "move it.")


# --- assign_buckets -----------------------------------------------------------------------------

def _parameters(*sizes):
    """One parameter for each size; a negative size: of that many in bfloat16, 2 bytes each.

    A size 7j is 7 numbers on another device ("meta" is one without memory).
    """
    made = []
    for n in sizes:
        elsewhere = isinstance(n, complex)
        dtype = torch.bfloat16 if not elsewhere and n < 0 else torch.float32
        made.append(nn.Parameter(torch.zeros(int(abs(n)), dtype=dtype,
                                             device="meta" if elsewhere else "cpu")))
    return made


# sizes in elements, the cap in bytes, and the right buckets as places in the list of parameters
CASES = (
    ("three equal layers, one in each bucket", (10, 10, 10), 40, [[2], [1], [0]]),
    ("a weight and a bias, three times", (100, 10, 100, 10, 100, 10), 300,
     [[5, 4], [3, 2], [1, 0]]),
    ("the last bucket is not full", (4, 4, 4, 4, 4), 32, [[4, 3], [2, 1], [0]]),
    ("one is larger than the cap", (3, 1000, 3), 40, [[2, 1], [0]]),
    ("all fit into one bucket", (5, 6, 7), 10**9, [[2, 1, 0]]),
    ("a cap of 1 byte", (5, 6, 7), 1, [[2], [1], [0]]),
    ("no parameters", (), 100, []),
    ("two types", (10, -10, 10, -10, 10), 60, [[4, 2], [3, 1], [0]]),
    ("numbers of two bytes", (-10, -10, -10, -10), 40, [[3, 2], [1, 0]]),
    ("two devices", (10, 10j, 10, 10j), 80, [[3, 1], [2, 0]]),
)


FROM_THE_END = ("Begin with the last parameter: backward begins at the end of the model, so the "
                "last gradients are ready first. Go through them in reverse.")


def check_assign_buckets(assign_buckets):
    for case, sizes, cap, right in CASES:
        parameters = _parameters(*sizes)
        buckets = _buckets(assign_buckets, parameters, cap)
        places = {id(p): place for place, p in enumerate(parameters)}
        got = [[places.get(id(p)) for p in bucket] for bucket in buckets]
        for what, kind in ("float32 and bfloat16", "dtype"), ("what lies on two devices", "device"):
            if any(len({getattr(p, kind) for p in bucket}) > 1 for bucket in buckets):
                raise Mistake(f"{case}: a bucket holds {what}", "A bucket is one flat piece of "
                              "memory: keep one open bucket for each (dtype, device).")
        if got != right:
            nbytes = ", ".join(str(p.nbytes) for p in parameters)
            raise Mistake(f"{case}: parameters of {nbytes} bytes, cap {cap}: the buckets are "
                          f"{got}; {right} is right", _bucket_hint(got, right, parameters, cap))
    yield "from the last parameter to the first; a bucket closes when it reaches the cap"
    yield "sizes are bytes; what is larger than the cap is not cut; the last one may be smaller"
    yield "one type on one device in each bucket; those that never reach the cap come last"
    try:
        assign_buckets(_parameters(3), 0)
    except ValueError:
        yield "a cap of 0 bytes is refused with a ValueError"
        return
    raise Mistake("cap_bytes=0 is accepted", "Say what is wrong: raise ValueError(...).")


def _buckets(assign_buckets, parameters, cap):
    try:
        buckets = assign_buckets((p for p in parameters), cap)
    except (TypeError, AttributeError) as error:
        raise Mistake(f"it raised {type(error).__name__}: {error}", "model.parameters() is no list "
                      "but a generator: it has no length, and runs once. list(parameters) makes "
                      "one.") from None
    if not isinstance(buckets, list) or not all(isinstance(each, list) for each in buckets):
        raise Mistake(f"it returned {str(buckets)[:60]}", "Return a list of lists of parameters.")
    return buckets


def _from_the_front(parameters, cap):
    """The places in each bucket of who goes the wrong way, in one type."""
    buckets = [[]]
    for place in range(len(parameters)):
        if sum(parameters[each].nbytes for each in buckets[-1]) >= cap:
            buckets.append([])
        buckets[-1].append(place)
    return buckets


def _bucket_hint(got, right, parameters, cap):
    places = [place for bucket in got for place in bucket]
    wanted = {place for bucket in right for place in bucket}
    if None in places:
        return "Put the parameters themselves into the buckets."
    if missing := sorted(wanted - set(places)):
        return f"Parameter {missing[0]} is in no bucket: what is still open at the end counts too."
    if [] in got:
        return "There is an empty bucket: open one when there is something to put into it."
    if (places == sorted(places) and len(places) > 1
            or any(bucket != sorted(bucket, reverse=True) for bucket in got)
            or got == [bucket[::-1] for bucket in _from_the_front(parameters, cap)][::-1]):
        return FROM_THE_END
    if sorted(got) == sorted(right):
        return ("First those that have reached the cap, in the order in which they did; then those "
                "still open, in the order in which they were opened. (A dict keeps the order of "
                "insertion: pop a bucket when it closes.)")
    if len({p.dtype for p in parameters}) > 1:
        return ("Keep one open bucket for each (dtype, device), side by side: another type does "
                "not close a bucket, and each has its own total of bytes.")
    if {p.itemsize for p in parameters} == {2}:
        return "A number in bfloat16 has two bytes, not four: parameter.nbytes counts them."
    counts = [sum(parameters[place].numel() for place in bucket) for bucket in got]
    if len(got) < len(right) and max(counts) * 4 > cap:
        return ("The cap is in bytes, not in elements (parameter.nbytes); and a bucket closes as "
                "soon as it holds that much, not more.")
    return ("Torch's rule: put the parameter in, and then close the bucket if it has reached the "
            "cap. So a bucket may be larger than the cap, by its last parameter.")
