"""What all checks of lab 08 share: forward and backward, compared with one process."""

from functools import partial
from typing import Any, NamedTuple

import torch

from ranklab.checks.beside import GROUP, expect
from ranklab.checks.failures import LEFT, MISMATCH
from ranklab.checks.trial import explain
from ranklab.engine import device
from ranklab.meter import Traffic
from ranklab.tensor_parallel.split import split_of

ALIKE = f"All ranks of the group must call the same collectives. {GROUP}"
FAILURES = {LEFT: ALIKE, MISMATCH: ALIKE, "ValueError: .*group.*": GROUP,
            "AttributeError: 'NoneType' object has no attribute 'requires_grad'":
                "It returns None.",
            "RuntimeError: .* by an inplace operation.*":
                "It writes into what others read: work on a copy."}


class Whole(NamedTuple):
    """A tensor in one process; a rank has the indices `at` along `dim`, or all of it."""

    tensor: Any
    dim: int = 0
    at: Any = None

    def part(self, whole):
        return whole if self.at is None or whole is None else whole.index_select(self.dim, self.at)

    def leaf(self):
        """This rank's part, with a gradient of its own."""
        return self.part(self.tensor.detach()).clone().requires_grad_(self.tensor.requires_grad)


def seeded(seed, *shape, dtype="float32"):
    """Random numbers, the same on all ranks."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(device(), getattr(torch, dtype))


def as_one_process(case, ranks, call, mine, one, wholes, out, hints, forward=(), backward=(),
                   named=None):
    """Looks at call() twice, then a backward of each; one() is the same in one process.

    mine    {name: this rank's tensor}: none is changed
    wholes  {name: Whole} where there is a gradient; out is the Whole of the value, without a tensor
    hints   {name, or "value": what is usually wrong there}
    forward, backward  bytes of a call's messages, at most; forward None: not looked at
    named   (where, value of the right shape) -> None, or a Mistake that says what it is instead
    """
    case, whole = f"{ranks}, {case}", one()
    w = seeded(9, *whole.shape).to(whole.dtype)
    if whole.requires_grad:
        whole.backward(w.clone())  # a gradient may be this very tensor
    w, right, changed = out.part(w), out.part(whole.detach()), []
    kept = [(name, x, x.detach().clone()) for name, x in (*mine.items(), ("the gradient given", w))]
    with Traffic() as first:
        values = [call(), call()]
    with Traffic() as second:
        for y in values:
            if y.requires_grad and (y.shape, y.dtype) == (w.shape, w.dtype):
                y.backward(w)
            changed = changed or [name for name, x, before in kept if not torch.equal(x, before)]
            kept = kept[:-1]  # later a gradient may be this very tensor
    yield partial(_same_names, case, changed, mine, wholes)
    for y in values:
        if named and y.shape == right.shape:
            yield partial(named, f"{case}: the value", y.detach())
        yield partial(_is, f"{case}: the value", y.detach(), right, ranks.size, hints["value"])
    for name in [name for name in mine if name in wholes]:
        if isinstance(wholes[name].tensor, torch.nn.Parameter):
            yield partial(_is_part, f"{case}: `{name}`", mine[name], wholes[name])
        got, right = mine[name].grad, wholes[name].part(wholes[name].tensor.grad)
        yield partial(_is, f"{case}: the gradient of {name}", got if got is None else got / 2,
                      right, ranks.size, hints.get(name, hints["value"]))
    if forward is not None:
        yield partial(_sends, f"{case}: forward", first.ops, forward)
    yield partial(_sends, f"{case}: backward", second.ops, backward)


def _is(where, got, right, R, hint):
    """`right` is None for the gradient of what is frozen."""
    if right is not None:
        explain(where, got, right, {
            f"{R} times what is right": (R * right, hint), "zeros": (0 * right, hint),
            f"1/{R} of what is right": (right / R, hint)}, hint)
    else:
        expect(got is None, f"{where} is there, but it is frozen", "requires_grad stays as it was.")


def _same_names(case, changed, mine, wholes):
    expect(not changed, f"{case}: {', '.join(changed)} is changed", "Others still read it: a "
           "collective works in place, so give it a clone().")
    extra = [name for name, x in mine.items() if x.is_floating_point() and name not in wholes]
    expect(not extra and not wholes.keys() - mine.keys(), f"{case}: its parameters are "
           f"{sorted(mine)}", "Keep the names, and register this rank's parts only: another "
           "parameter would stay in memory.")


def _is_part(where, parameter, whole):
    explain(where, parameter.detach(), whole.part(whole.tensor.detach()), None, "weight is (out, "
            "in): outputs are its rows, dim 0, inputs its columns, dim 1. Some of each of `parts`.")
    expect(parameter.untyped_storage().nbytes() <= parameter.nbytes, f"{where} keeps the whole in "
           "memory", "That is a view; split_parameter makes a copy.")
    split, right = split_of(parameter), None
    if whole.at is not None:
        right = whole.dim, whole.tensor.shape[whole.dim], whole.at.tolist()
    if split:
        split = split.dim, split.size, [n for pair in split.ranges for n in range(*pair)]
    expect(split == right, f"{where} does not know which part of the whole it is", "The norm of "
           "the gradient and checkpoints ask split_of(parameter): make it with split_parameter, or "
           "set parameter.shard_spec.")


def _sends(where, ops, most):
    """`ops` are those of two calls."""
    sent, names = [op.payload_bytes for op in ops], ", ".join(sorted({op.name for op in ops}))
    expect(len(sent) <= 2 * len(most) and sum(sent) <= 2 * sum(most), f"{where} sends "
           f"{len(sent) / 2:g} messages of {sum(sent) / 2:g} bytes in all ({names}), not "
           f"{len(most)} of {sum(most)}", "f sends in backward alone, g in forward alone. x enters "
           "a region once, also where three layers read it.")
