"""Shared by the exercises of lab 08: forward and backward on ranks, and in one process.

With the oracle `in_one_process`, `see` shows the values of one process, cut to this rank's part.
"""

from typing import Any, NamedTuple

import torch

from ranklab.checks.prover import GROUPS, AtMost, Must, Stage
from ranklab.checks.trial import refuses
from ranklab.engine import device
from ranklab.meter import Traffic
from ranklab.tensor_parallel.split import split_of

IN_GROUPS = "It was right on all ranks. Here there are groups, whose ranks are not 0 .. n-1."
COST = ("bytes sent in forward", "messages in forward", "bytes sent in backward",
        "messages in backward")
GROUP = "Pass `group` on to every call that takes one."


def in_one_process(*_, **__):
    """Replace the answer as an oracle; it is never called."""


class Whole(NamedTuple):
    """A tensor in one process; a rank has the indices `at` along `dim`, or all of it."""

    tensor: Any
    dim: int = 0
    at: Any = None

    def part(self, whole):
        return whole if self.at is None or whole is None else whole.index_select(self.dim, self.at)

    def leaf(self):
        """Return this rank's part, as a leaf with its own gradient."""
        return self.part(self.tensor.detach()).clone().requires_grad_(self.tensor.requires_grad)


def normal(seed, *shape, dtype="float32"):
    """Return random numbers, the same on all ranks."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device(), getattr(torch, dtype))


def whole_numbers(seed, *shape, dtype="float32"):
    """Return random whole numbers, the same on all ranks: small sums are exact in every type.

    In float64 they are slightly larger, by an amount that float32 would lose.
    """
    numbers = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device(), getattr(torch, dtype)) * (1 + 2.0**-26 * (dtype == "float64"))


def transposed(x):
    """Return x with other strides: its last two dims are swapped in memory."""
    return x.mT.contiguous().mT


def filled(module, frozen="", numbers=whole_numbers):
    """Return `module` with the same numbers on all ranks; parameters named `frozen` are frozen."""
    for place, (name, p) in enumerate(module.to(device()).named_parameters()):
        p.data.copy_(numbers(place, *p.shape) / 2)
        p.requires_grad_(not (frozen and name.startswith(frozen)))
    return module


def stages(holds, see, cases, also=()):
    """Return two stages: on all four ranks, then in groups of one, two and three of them.

    also  more cases for all ranks
    """
    return (Stage(holds, see, (*cases, *also), (4,), oracle=in_one_process),
            Stage("the same in groups of 1, 2 and 3 ranks; it talks only to ranks of the group",
                  see, cases,
                  (4,), GROUPS, in_one_process, IN_GROUPS))


def seen_of(fn, ranks, call, tensors, one, wholes, weights, forward=(), backward=()):
    """Yield the observations of two calls, then those after a backward of each.

    call     () -> this rank's value
    tensors  {name: this rank's tensor}; none may change
    one      () -> the value in one process
    wholes   {name: Whole} of all tensors
    weights  the Whole of the value's gradient
    forward, backward  the bytes of each message that a call needs; None: not checked
    """
    is_one = fn is in_one_process
    if is_one:
        call, tensors = one, {name: whole.tensor for name, whole in wholes.items()}

    def part_of(whole, x):
        return whole.part(x) if is_one else x

    def unchanged(when):
        return {f"{name} after {when}": part_of(wholes[name], tensors.get(name)) for name in wholes}

    with Traffic() as traffic:
        values = [call(), call()]
    yield {**unchanged("forward"),
           "the value": part_of(weights, values[0]),
           "the value of a second call": part_of(weights, values[1]),
           **messages(ranks, traffic, forward, "forward", len(values))}
    for value in values:
        gradient = (weights.tensor if is_one else weights.part(weights.tensor)).clone()
        if ranks.index % 2 and not is_one and gradient.dim() > 1:
            gradient = transposed(gradient)  # ranks need not agree on strides
        with Traffic() as traffic:
            if (isinstance(value, torch.Tensor) and value.requires_grad
                    and (value.shape, value.dtype) == (gradient.shape, gradient.dtype)):
                value.backward(gradient)
        yield {**unchanged("backward"),
               "the value's gradient after backward": part_of(weights, gradient),
               **{f"the gradient of {name}": part_of(
                   whole, getattr(tensors.get(name), "grad", None))
                  for name, whole in wholes.items() if whole.tensor.is_floating_point()},
               **messages(ranks, traffic, backward, "backward")}


def messages(ranks, traffic, needed, when, calls=1):
    """Return what was sent, with the bytes of each message that one call needs."""
    outside = {rank for op in traffic.ops for rank in op.group} - {*ranks.members}
    values = {f"the list of other groups' ranks that it meets in {when}": Must(sorted(outside), [])}
    if needed is None:
        return values
    names = ", ".join(sorted({op.name for op in traffic.ops}))
    sent = sum(op.payload_bytes for op in traffic.ops)
    return values | {
        f"bytes sent in {when}": AtMost(
            sent / calls, sum(needed),
            f"sends {{:,.0f}} bytes in {when} ({names}); {{:,.0f}} are enough"),
        f"messages in {when}": AtMost(len(traffic.ops) / calls, len(needed))}


def seen_of_parameters(fn, module, wholes):
    """Return the observations of a layer's parameters: only this rank's parts, marked with the
    whole to which they belong.

    wholes  {name: Whole}
    """
    is_one = fn is in_one_process
    parameters = {} if is_one else dict(module.named_parameters())
    values = {"the list of its parameters": sorted(wholes if is_one else parameters)}
    for name, whole in wholes.items():
        part = whole.part(whole.tensor)
        p = part if is_one else parameters.get(name, torch.empty(0))
        split = split_of(p)
        if split:
            split = [split.dim, split.size, [n for pair in split.ranges for n in range(*pair)]]
        elif is_one and whole.at is not None:
            split = [whole.dim, whole.tensor.shape[whole.dim], whole.at.tolist()]
        values |= {
            name: p,
            f"bytes that hold {name}": AtMost(
                0 if is_one else p.untyped_storage().nbytes(), part.nbytes,
                f"keeps {{:,.0f}} bytes in memory for {name}; its part has {{:,.0f}}"),
            f"split_of({name}), its dim, size and indices,": split}
    return values


def refusal_of(fn, call):
    """Return the observations of a call that must raise ValueError."""
    is_refused = fn is in_one_process or refuses(call)
    return {"what it raises": Must("ValueError" if is_refused else "no ValueError", "ValueError")}
