"""The check of average_gradients."""

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.data_parallel.events import Sent, collectives_noted
from ranklab.checks.data_parallel.replicas import GROUP, group_of_mine, members_of
from ranklab.checks.data_parallel.toys import gradients, toy, weights
from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import on_ranks
from ranklab.meter import Traffic

MISSING = "wide.weight"  # has no gradient on rank 0; in float64
ALL_MISSING = MISSING, "first.bias", "twice.bias"  # two of them are of one shape and type
LIMIT = 5  # seconds; a rank that skips a parameter waits for ever


def _given(name, shape, rank):
    """The gradient that `rank` has for a parameter, as a function of both."""
    random = torch.Generator().manual_seed(1000 * rank + sum(map(ord, name)))
    return torch.randn(shape, generator=random)


def _average_trial(average_gradients, in_groups=False):
    group, rank = group_of_mine() if in_groups else None, dist.get_rank()
    model, sent = _model(rank), Sent()  # not equal, so that it shows when weights are averaged
    before = weights(model)
    for name, p in model.named_parameters():
        if p.requires_grad and not (name in ALL_MISSING and rank == 0):
            p.grad = torch.empty_like(p).copy_(_given(name, p.shape, rank))
    with Traffic() as traffic, collectives_noted(sent.note):
        average_gradients(model, group) if in_groups else average_gradients(model)
    _once_more(average_gradients, rank, group)
    moved = [name for name, value in weights(model).items() if not torch.equal(value, before[name])]
    nbytes = sum(op.payload_bytes for op in traffic.ops)
    return gradients(model), moved, nbytes, dict(traffic.calls), (sent.not_waited,
                                                                  len(sent.handles), sent.divided)


def _once_more(average_gradients, rank, group):
    """On another model of the same shapes, which must not touch the gradients of the first."""
    other = _model(rank)
    for p in other.parameters():
        p.grad = torch.full_like(p, 7.0) if p.requires_grad else None
    average_gradients(other, group)


def _model(seed):
    """The toy, and a parameter whose numbers lie in another order in memory."""
    model = toy(seed)
    images = torch.rand(2, 3, 2, 2).to(model.scale)
    model.images = nn.Parameter(images.contiguous(memory_format=torch.channels_last))
    return model


def check_average_gradients(average_gradients):
    for ranks in (3, 1, 4):
        try:
            seen = on_ranks(_average_trial, average_gradients, ranks=ranks, timeout=LIMIT)
        except Mistake as mistake:
            raise Mistake(mistake.what, _average_hint(mistake)) from None
        for rank, (got, moved, _, _, handles) in enumerate(seen):
            _compare_handles(f"rank {rank} of {ranks}", *handles)
            _compare_averages(f"rank {rank} of {ranks}", got, moved, range(ranks), rank)
    yield "every gradient is the mean over ranks, on 1, 3, 4 ranks; in two types"
    yield "where a rank has no gradient it counts as zeros; frozen parameters stay without"
    trained = [p for p in _model(0).parameters() if p.requires_grad]
    wanted = sum(p.nbytes for p in trained)
    tied = _model(0).first.weight.nbytes
    for rank, (_, _, sent, calls, _) in enumerate(seen):
        if (sent != wanted or set(calls) != {"all_reduce"}
                or calls["all_reduce"] > len(trained)):
            hint = ("All-reduce each gradient once, whole. Gathering everybody's gradients costs R "
                    "times the memory.")
            if sent < wanted:
                hint = "Each gradient travels in its own type: in float32 a double loses digits."
            if sent == wanted + tied:
                hint = ("The tied weight travels twice: model.parameters() lists it once, "
                        "named_parameters(remove_duplicate=False) and a walk over the modules do "
                        "not.")
            raise Mistake(f"rank {rank} of 4 puts {sent:,} bytes into {calls}; {wanted:,} bytes in "
                          f"{len(trained)} all-reduces are enough", hint)
    yield f"one all-reduce for each of {len(trained)} parameters, or fewer; gradients travel once"
    seen = on_ranks(_average_trial, average_gradients, True, ranks=4)
    for rank, (got, *_) in enumerate(seen):
        members = members_of(rank)
        for name, right in _averages(members).items():
            if not _near(got[name], right):
                raise Mistake(f"in the group of ranks {members} the gradient of `{name}` is not "
                              "the mean of theirs",
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
    for name, p in _model(0).named_parameters():
        if p.requires_grad:
            ours = [_given(name, p.shape, r) for r in members
                    if name not in ALL_MISSING or r]
            right[name] = (sum(ours) / len(members)).to(p.dtype) if ours else torch.zeros_like(p)
    return right


def _compare_handles(where, not_waited, handles, divided):
    if not_waited:
        raise Mistake(f"{where}: nobody has waited for {not_waited} of its {handles} all-reduces",
                      "With async_op=True an all-reduce has only begun when it returns. Keep every "
                      "handle and wait() for each, not for the last alone; or leave async_op out.")
    if divided:
        raise Mistake(f"{where}: {divided} gradients were divided while they travelled",
                      "Until wait() returns the message is being read and written. Divide before "
                      "the all-reduce, or after the wait().")


def _near(got, right):
    return got is not None and got.shape == right.shape and torch.allclose(got, right, atol=1e-6)


def _compare_averages(where, got, moved, members, rank):
    if moved:
        raise Mistake(f"{where}: the weights have changed, `{moved[0]}` first",
                      "Average parameter.grad, not the parameter: the weights are equal already, "
                      "and stay so when equal gradients are added.")
    R = len(members)
    averages = _averages(members)
    off = [name for name, right in averages.items() if not _near(got[name], right)]
    for name in off:
        right = averages[name]
        if got[name] is None:
            raise Mistake(f"{where}: `{name}` has no gradient", "The others have one, so this rank "
                          "needs the mean as well: make a gradient of zeros first.")
        if _near(got[name], right * R):
            raise Mistake(f"{where}: the gradient of `{name}` is the sum, {R} times the mean",
                          "Divide by the number of ranks, or every step is R times too long.")
        if off == ["images"]:
            raise Mistake(f"{where}: the gradient of `images`, which is channels-last, is not the "
                          "mean over ranks", "Its numbers lie in another order in memory: "
                          ".contiguous() and .reshape(-1) make a copy of it, and the mean must get "
                          "into parameter.grad itself.")
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
