"""The check of scale_loss: against torch.amp.GradScaler, step by step."""

import torch
from torch import nn

from ranklab.baseline.precision import LossScale
from ranklab.checks.beside import expect, located


def half_loss(w, x, factor):
    """A loss whose gradient passes through fp16, as activations' gradients do: factor * x."""
    return (w.half() * x).float().sum() * factor


# What the gradients of the two parameters are multiplied by: 64 x 2^12 overflows in fp16. With
# -5 x 2^13 one number alone does, to minus infinity: twice that, and the other is half of it.
FACTORS = (
    (1.0, 1.0), (1.0, 1.0), (1e-8, 1.0),  # the scale doubles after these three
    (1.0, 1.0), (1.0, 1.0), (1.0, 1.0),  # and after these, not before
    (1.0, 1.0), (1.0, 1.0), (64.0, 64.0),  # two clean steps, then an overflow: count from 0
    (1.0, 1.0), (1.0, 1.0), (1.0, 1.0),
    (1.0, -5.0), (1.0, 1.0), (float("nan"), 1.0),  # one parameter alone, the second and the first
    (1.0, 1.0), (1.0, 1.0), (1.0, 1.0),
)  # fmt: skip


SAID = {5: "three clean steps: the scale doubles; and after three more again",
        8: "an overflow: no step, half the scale",
        11: "three clean steps after it: doubled again",
        14: "one bad gradient, the first or the second, inf or NaN: no step, half the scale"}
LOOK = ("Look before you step: if any gradient is inf or NaN, skip the step. A gradient of zero "
        "still moves the weights, by their momentum.")
ONE_BAD = ("Only one of the two parameters has a bad gradient here, perhaps in one number only: "
           "look at all gradients, not at those of one parameter.")
DIVIDE = ("Divide the gradients by the scale that the loss was multiplied by, in all param_groups, "
          "before optimizer.step(); and start each step from zero gradients.")
LOST = "A gradient of 1e-8 was lost: fp16 can't hold it. Scale the loss before backward."
DOUBLES = "After `interval` clean steps the scale doubles; `interval` steps later it doubles again."
TOO_SOON = {"overflow": "It doubles too soon: an overflow sets clean_steps back to 0.",
            "doubling": "It doubles too soon: doubling sets clean_steps back to 0.",
            "start": "It doubles too soon: after `interval` clean steps in a row."}


def _scaled_run(step):
    """[(weights, gradients of the step or None, scale)] of two parameters, side by side;
    `step(loss, optimizer)` returns the new scale.
    """
    first, second = (nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(2))
    unused = nn.Parameter(torch.ones(1))  # has no gradient, like a frozen or skipped layer
    groups = [{"params": [first, unused]}, {"params": [second]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    used, seen, x = [], [], torch.tensor([2.0, 0.5]).half()
    optimizer.register_step_pre_hook(lambda *_: used.append(torch.cat(
        [torch.zeros(2) if w.grad is None else w.grad for w in (first, second)])))
    for a, b in FACTORS:
        used.clear()
        scale = step(half_loss(first, x, a) + half_loss(second, x, b), optimizer)
        weights = torch.cat([first, second]).detach()
        seen.append((weights, used[0] if used else None, scale))
    return seen


def check_scale_loss(scale_loss):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11, growth_interval=3)
    state, changed_by, scale = LossScale(2.0**11, 0, 3), "start", 2.0**11

    def step_of_torch(loss, optimizer):
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    def step(loss, optimizer):
        nonlocal state
        state = scale_loss(loss, optimizer, state)
        expect(isinstance(state, LossScale), f"it returned {state!r}",
               "Return a LossScale: state._replace(...)")
        return state.scale

    for at, (mine, right) in enumerate(zip(_scaled_run(step), _scaled_run(step_of_torch))):
        located(f"step {at + 1}, gradients x {FACTORS[at][0]:g} and x {FACTORS[at][1]:g}",
                _compare, *mine, *right, FACTORS[at], changed_by)
        if right[2] != scale:
            changed_by, scale = "overflow" if right[1] is None else "doubling", right[2]
        if at in SAID:
            yield SAID[at]
    yield "weights and scale are torch.amp.GradScaler's, step by step"
    _compare_fresh(scale_loss)
    yield "all that it remembers is in `state`: a second run, one step before it doubles"


def _compare(w, used, scale, right_w, right_used, right_scale, factors, changed_by):
    overflowed = right_used is None
    expect(used is None or not overflowed, "the optimizer stepped, though a gradient was not "
           "finite", LOOK if factors[0] == factors[1] else ONE_BAD)
    expect(used is not None or overflowed, "the optimizer did not step",
           "All gradients are finite here. A parameter may have no gradient at all.")
    if not overflowed:
        is_lost = (used == 0)[right_used != 0].any()
        expect(torch.allclose(used, right_used, rtol=1e-3, atol=0), "the optimizer got "
               f"{used.tolist()}; right is {right_used.tolist()}", LOST if is_lost else DIVIDE)
    expect(torch.allclose(w, right_w, rtol=1e-4), f"the weights are {w.tolist()}; right are "
           f"{right_w.tolist()}", "Only optimizer.step() may change them, once a step.")
    expect(scale == right_scale, f"the scale is {scale:g}; right is {right_scale:g}",
           "After an overflow the scale halves." if overflowed else
           DOUBLES if right_scale > scale else TOO_SOON[changed_by])


def _compare_fresh(scale_loss):
    """One clean step from another state: nothing of the first run may be in it."""
    weight = nn.Parameter(torch.ones(2))
    optimizer, state = torch.optim.SGD([weight], lr=0.0), LossScale(2.0**9, 1, 2)
    for wanted in (LossScale(2.0**10, 0, 2), LossScale(2.0**10, 1, 2)):
        got, state = scale_loss(weight.sum(), optimizer, state), wanted
        expect(got == wanted, "a second run, with interval=2 and one clean step made: "
               f"{got}; right is {wanted}", "Count in state.clean_steps and take state.interval; "
               "keep nothing between two calls, in a global or a default argument.")
