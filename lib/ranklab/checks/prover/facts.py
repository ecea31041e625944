"""How a difference is told: what is seen, and what is right. No guesses."""

import torch

from ranklab.checks.exercise import shown
from ranklab.checks.prover.compare import (
    Agree, AtMost, InAll, Must, Raised, Told, is_alike, plain, value_at,
)
from ranklab.checks.trial import instead, rounding, told_apart


def fact(stage, results, right, step, name, rank):
    """Return one sentence: what this rank shows, and what is right."""
    where, members, _ = right[rank][step]
    got, due = value_at(results[rank], step, name), right[rank][step].values[name]
    if isinstance(got, Raised) and not isinstance(due, Raised):
        return f"{where}: it raised {got.headline}\n{got.text}"
    if isinstance(due, Raised):
        return f"{where}: {got.headline if isinstance(got, Raised) else 'no error'}, not {due.kind}"
    if isinstance(due, AtMost | InAll | Agree) and not isinstance(got, type(due)):
        return f"{where}: {name} is not there"
    if isinstance(due, AtMost):
        limit = due.number if got.limit is None else got.limit
        if got.says:
            return f"{where}, {got.says.format(got.number, limit)}"
        return f"{where}: {name}: {shown(got.number)}; {shown(limit)} are enough"
    if isinstance(due, InAll):
        numbers = [value_at(results[member], step, name) for member in members]
        limits = [each.limit if each.limit is not None else right[member][step].values[name].number
                  for each, member in zip(numbers, members)]
        total = sum(each.number for each in numbers)
        return f"{where}: {name}: {shown(total)}; {shown(sum(limits))} are enough"
    if isinstance(due, Agree):
        return f"{where}: {name} differs from that of rank {members[0]} in its last bits"
    if isinstance(due, Must):
        got, due = got if isinstance(got, Must) else (got, due.be)
        if due is True and isinstance(got, str):  # Must(is_same or "changed", True)
            return f"{where}: {name}: {got}"
    telling = next((each for each in (due, got) if isinstance(each, Told)), None)
    got, due = plain(got), plain(due)
    if telling and (text := telling.tell(got, due)):
        return f"{where}: {name} is {text}"
    part = _first_wrong(stage, got, due)
    if part is not None:
        name, got, due = f"number {part} of {name}", got[part], due[part]
    if isinstance(got, torch.Tensor) and got.numel() > 1:
        for relation, value in _relatives(right, step, name, rank, due):
            if is_alike(stage, got, value) and not is_alike(stage, value, due):
                return f"{where}: {name} is {relation}"
    return f"{where}: {name} is {_instead(got, due)}{_which(stage, got, due)}"


def _first_wrong(stage, got, due):
    """Return the index of the first tensor that is wrong, where both are lists of tensors."""
    if not all(isinstance(each, list | tuple) and each and isinstance(each[0], torch.Tensor)
               for each in (got, due)) or len(got) != len(due):
        return None
    return next((i for i, pair in enumerate(zip(got, due)) if not is_alike(stage, *pair)), None)


def _relatives(right, step, name, rank, due):
    """Yield (what a wrong value may be by its relation to `due`, the value)."""
    _, members, of_rank = right[rank][step]
    R = len(members)

    yield from ((f"the same as {key}", plain(value)) for key, value in of_rank.items()
                if key != name)
    yield from ((f"what rank {member} must have", plain(right[member][step].values.get(name)))
                for member in members if member != rank)
    if isinstance(due, torch.Tensor):
        yield "zeros", torch.zeros_like(due)
        if due.is_floating_point():
            if R > 1:
                yield f"{R} times what is right", R * due
                yield f"1/{R} of what is right", due / R
            if len(right) != R:
                yield "divided by the number of all ranks", due * R / len(right)
    case, number = step
    for neighbour, direction in ((number - 1, "earlier"), (number + 1, "later")):
        if (case, neighbour) in right[rank]:
            yield (f"what is right one step {direction}",
                   plain(right[rank][case, neighbour].values.get(name)))


def _instead(got, due):
    if due is None:
        return "there, and nothing is right"
    if isinstance(due, torch.Tensor) or isinstance(got, torch.Tensor):
        return instead(got, due)
    if all(isinstance(each, int | float) and not isinstance(each, bool) for each in (got, due)):
        return "{}, not {}".format(*told_apart(got, due))
    return f"{got!r:.200}, not {due!r:.200}"


def _which(stage, got, due):
    """Return which elements of a tensor are wrong, where the others are right."""
    if not all(isinstance(each, torch.Tensor) for each in (got, due)) or (
            (got.shape, got.dtype) != (due.shape, due.dtype) or not due.is_floating_point()):
        return ""
    tolerance = rounding(*filter(None, (due.dtype, stage.through)), roundings=stage.roundings)
    got, due = got.double().flatten(), due.double().flatten()
    finite = due[due.isfinite()].abs()
    near = (got - due).abs() <= tolerance * (finite.max() if len(finite) else 0)
    at = torch.nonzero(~near & (got != due)).flatten().tolist()
    if not 1 < len(at) < len(due):
        return ""
    return f" ({len(at)} of {len(due)} elements are wrong, from {at[0]} to {at[-1]})"
