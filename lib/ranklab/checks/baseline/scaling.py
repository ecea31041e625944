"""The check of scale_loss: against torch.amp.GradScaler, step by step."""

import torch
from torch import nn

from ranklab.baseline.precision import LossScale
from ranklab.course.exercise import Mistake


def half_loss(w, x, factor):
    """A loss whose gradient passes through fp16, as activations' gradients do: factor * x."""
    return (w.half() * x).float().sum() * factor


FACTORS = (1.0, 1.0, 1e-8, 64.0, 1.0, 1.0, 1.0, float("nan"), 1.0, 1.0)  # 64 x 2^12 overflows


def _scaled_run(step):
    """[(w, gradient of the step or None, scale)]; `step(loss, optimizer)` returns the new scale."""
    w = nn.Parameter(torch.tensor([1.0, 2.0]))
    unused = nn.Parameter(torch.ones(1))  # has no gradient, like a frozen or skipped layer
    optimizer = torch.optim.SGD([w, unused], lr=0.1, momentum=0.9)
    used, seen = [], []
    optimizer.register_step_pre_hook(lambda *_: used.append(w.grad.clone()))
    for factor in FACTORS:
        used.clear()
        scale = step(half_loss(w, torch.tensor([1.0, 0.5]).half(), factor), optimizer)
        seen.append((w.detach().clone(), used[0] if used else None, scale))
    return seen


def _torchs_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11, growth_interval=3)

    def step(loss, optimizer):
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    return step


def check_scale_loss(scale_loss):
    state = LossScale(2.0**11, 0, 3)

    def step(loss, optimizer):
        nonlocal state
        state = scale_loss(loss, optimizer, state)
        if not isinstance(state, LossScale):
            raise Mistake(f"it returned {state!r}", "Return a LossScale: state._replace(...)")
        return state.scale

    right, got = _scaled_run(_torchs_scaler()), _scaled_run(step)
    said = {2: "three clean steps: the scale doubles", 3: "an overflow: no step, half the scale",
            6: "three clean steps after it: doubled again",
            7: "a NaN: no step, half the scale"}  # fmt: skip
    for at, (mine, torchs) in enumerate(zip(got, right)):
        _compare_scaled(f"step {at + 1}, loss x {FACTORS[at]:g}", mine, torchs)
        if at in said:
            yield said[at]
    yield "weights and scale are torch.amp.GradScaler's, step by step"


def _compare_scaled(case, mine, torchs):
    (w, used, scale), (right_w, right_used, right_scale) = mine, torchs
    if right_used is None and used is not None:
        raise Mistake(f"{case}: the optimizer stepped, though a gradient was not finite",
                      "Look before you step: if any gradient is inf or NaN, skip the step. Setting "
                      "it to zero and stepping still moves the weights, by their momentum.")
    if right_used is not None and used is None:
        raise Mistake(f"{case}: the optimizer did not step",
                      "All gradients are finite here. A parameter may have no gradient at all.")
    if used is not None and not torch.allclose(used, right_used, rtol=1e-3, atol=0):
        what = f"{case}: the optimizer got {used.tolist()}; right is {right_used.tolist()}"
        if used.any():
            raise Mistake(what, "Divide the gradients by the scale before optimizer.step(), and "
                                "start each step from zero gradients.")
        raise Mistake(what, "Its gradient was lost: 1e-8 is below what fp16 can hold. Scale the "
                            "loss before backward, not the gradients after it.")
    if not torch.allclose(w, right_w, rtol=1e-4):
        raise Mistake(f"{case}: the weights are {w.tolist()}; right are {right_w.tolist()}",
                      "Only optimizer.step() may change them, once a step.")
    if scale != right_scale:
        if right_used is None:
            hint = "After an overflow the scale halves."
        elif right_scale > scale:
            hint = "After `interval` clean steps in a row the scale doubles."
        else:
            hint = ("It doubles too soon. An overflow sets clean_steps back to 0, and so does "
                    "doubling.")
        raise Mistake(f"{case}: the scale is {scale:g}; right is {right_scale:g}", hint)
