"""The check of scale_loss: what the optimizer gets and the next scale, step by step."""

import torch
from torch import nn

from ranklab.baseline.precision import LossScale
from ranklab.checks.beside import expect, located

INPUT = torch.tensor([2.0, 0.5])  # the true gradient of each parameter is a factor times this
START = "It doubles too soon: after `interval` clean steps in a row."
DOUBLES = "After `interval` clean steps the scale doubles; `interval` steps later it doubles again."
DOUBLED = "It doubles too soon: doubling sets clean_steps back to 0."
HALVES = "After an overflow the scale halves."
HALVED = "It doubles too soon: an overflow sets clean_steps back to 0."
CLEAN, NAN = (1.0, 1.0), float("nan")
# The factors of two parameters, and what a wrong scale means after the step. 64 overflows in fp16;
# with -5 one number of one parameter does, to minus infinity.
STEPS = (
    (CLEAN, START), (CLEAN, START), ((2.0**-27, 1.0), DOUBLES),
    (CLEAN, DOUBLED), (CLEAN, DOUBLED), (CLEAN, DOUBLES),
    (CLEAN, DOUBLED), (CLEAN, DOUBLED), ((64.0, 64.0), HALVES),
    (CLEAN, HALVED), (CLEAN, HALVED), (CLEAN, DOUBLES),
    ((1.0, -5.0), HALVES), (CLEAN, HALVED), ((NAN, 1.0), HALVES),
    (CLEAN, HALVED), (CLEAN, HALVED), (CLEAN, DOUBLES),
)  # fmt: skip


def check_scale_loss(scale_loss):
    first, second, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))  # unused: no gradient
    groups = [{"params": [first, unused]}, {"params": [second]}]
    optimizer, state, used = torch.optim.SGD(groups, lr=0.1), LossScale(2.0**11, 0, 3), []
    optimizer.register_step_pre_hook(lambda *_: used.append(torch.stack(
        [torch.zeros(2) if w.grad is None else w.grad for w in (first, second)])))
    for number, (factors, hint) in enumerate(STEPS, 1):
        used.clear()
        scale = state.scale * {HALVES: 0.5, DOUBLES: 2}.get(hint, 1)
        # The gradients pass through fp16, as those of activations do.
        loss = sum((w.half() * INPUT.half()).float().sum() * factor
                   for w, factor in zip((first, second), factors))
        state = scale_loss(loss, optimizer, state)
        located(f"step {number}, gradients x {factors[0]:g} and x {factors[1]:g}", _compare, state,
                scale, used, factors, hint)
    yield "gradients are divided by the scale; a step with inf or NaN, in one number only, is left"
    yield "the scale doubles after three clean steps, and halves after an overflow: 18 steps"
    state = scale_loss(first.sum(), optimizer, LossScale(2.0**9, 1, 2))
    expect(state == LossScale(2.0**10, 0, 2), "a second run, with interval=2 and one clean step "
           f"made: {state}", "Count in state.clean_steps and take state.interval; keep nothing "
           "between two calls, in a global or a default argument.")
    yield "all that it remembers is in `state`: a second run, one step before it doubles"


def _compare(state, scale, used, factors, hint):
    expect(isinstance(state, LossScale), f"it returned {state!r}", "Return a LossScale: "
           "state._replace(...)")
    expect(not (used and hint is HALVES), "the optimizer stepped, though a gradient was not finite",
           "Look before you step: if any gradient is inf or NaN, skip the step." if
           factors[0] == factors[1] else "Only one of the two parameters has a bad gradient here, "
           "perhaps in one number only: look at all gradients, not at those of one parameter.")
    expect(used or hint is HALVES, "the optimizer did not step", "All gradients are finite here. A "
           "parameter may have no gradient at all.")
    for got in used:
        right = torch.tensor(factors)[:, None] * INPUT
        expect(len(used) == 1 and torch.allclose(got, right, rtol=1e-3, atol=0), f"the optimizer "
               f"got {got.tolist()}; right is {right.tolist()}, in one step",
               "A gradient below 1e-8 was lost: fp16 can't hold it. Scale the loss before backward."
               if not got.all() else "Divide the gradients by the scale that the loss was "
               "multiplied by, in all param_groups, before optimizer.step(); and start each step "
               "from zero gradients.")
    expect(state.scale == scale, f"the scale is {state.scale:g}; right is {scale:g}", hint)
