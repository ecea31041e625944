"""scale_loss, compared with torch.amp.GradScaler: the optimizer's gradients and the next scale."""

from typing import NamedTuple

import torch
from torch import nn

from ranklab.baseline import LossScale, scale_loss
from ranklab.checks.prover import Proof, Slip, Stage

INPUT = torch.tensor([2.0, 0.5])  # the true gradient of each parameter is a factor times this
CLEAN, NAN = (1.0, 1.0), float("nan")
# The factors of two parameters. 2^-27 is lost in fp16 unless the loss is scaled. -64 overflows
# to minus infinity; with -5 and -10 one number of one parameter does.
FACTORS = (CLEAN, CLEAN, (2.0**-27, 1.0), *[CLEAN] * 5, (-64.0, -64.0), *[CLEAN] * 3, (1.0, -5.0),
           CLEAN, (-10.0, 1.0), (NAN, NAN), *[CLEAN] * 3)
STEPS = tuple(f"step {number}, gradients x {first:g} and x {second:g}"
              for number, (first, second) in enumerate(FACTORS, 1))


class Run(NamedTuple):
    """The first steps of a run, starting from a given state."""

    state: LossScale
    steps: int
    shows_all: bool = False  # of the state after the last step

    def __str__(self):
        return f"from {self.state}"


def _see(fn, case):
    first, second, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))  # unused: no gradient
    optimizer = torch.optim.SGD([{"params": [first, unused]}, {"params": [second]}], lr=0.1)
    state, used = case.state, []
    optimizer.register_step_pre_hook(lambda *_: used.append(
        [None if w.grad is None else w.grad.clone() for w in (first, second)]))
    for name, factors in zip(STEPS[: case.steps], FACTORS):
        used.clear()
        # The gradients pass through fp16, as those of activations do.
        loss = sum((w.half() * INPUT.half()).float().sum() * factor
                   for w, factor in zip((first, second), factors))
        state = fn(loss, optimizer, state)
        is_state = isinstance(state, LossScale)
        a, b = used[0] if used else (None, None)
        yield {f"{name}: the number of optimizer steps": len(used),
               f"{name}: the first gradient that the optimizer got": a,
               f"{name}: the second gradient that the optimizer got": b,
               f"{name}: the next scale": (
                   float(state.scale) if is_state else f"a {type(state).__name__}, no LossScale")}
        if not is_state:
            return
    if case.shows_all:
        yield {"the next state": [float(state.scale), int(state.clean_steps), int(state.interval)]}


def by_grad_scaler(loss, optimizer, state):
    scaler = torch.amp.GradScaler(loss.device.type)
    scaler.load_state_dict({
        "scale": state.scale, "growth_factor": 2.0, "backoff_factor": 0.5,
        "growth_interval": state.interval, "_growth_tracker": state.clean_steps})
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return LossScale(scaler.get_scale(), scaler.state_dict()["_growth_tracker"], state.interval)


FINITE = "all(gradient.isfinite().all() for gradient in gradients)"
OVERFLOWS = f"if not {FINITE}:"
SCALED, DIVIDES = "(loss * state.scale)", "gradient.div_(state.scale)"
SKIPS = "optimizer.zero_grad()\n        return"
HALVED, DOUBLED = "scale=state.scale / 2, clean_steps=0", "scale=state.scale * 2, clean_steps=0"
COUNTS, REACHED = "clean_steps=state.clean_steps + 1", "state.clean_steps + 1 < state.interval"
SCALE_LOSS = Proof(
    scale_loss,
    Stage({"gradients are divided by the scale; a step with inf or NaN, even in a single number, "
           "is skipped": (),
           "the scale doubles after three clean steps, and halves after an overflow: 19 steps": ()},
          _see, (Run(LossScale(2.0**11, 0, 3), len(STEPS)),), oracle=by_grad_scaler),
    Stage("everything it remembers is in `state`: a second run, one step before it doubles",
          _see, (Run(LossScale(2.0**9, 1, 2), 1, shows_all=True),
                 Run(LossScale(2.0**9, 0, 2), 1, shows_all=True)), oracle=by_grad_scaler),
    mistakes=(
        Slip("The optimizer gets gradients that are still scaled. Divide them in place, "
             "gradient.div_(state.scale), before optimizer.step(): gradient = gradient / scale "
             "only makes a new tensor.", (DIVIDES, "pass"),
             (f"    for gradient in gradients:\n        {DIVIDES}", "    for gradient in []:\n"
              "        pass"),
             (DIVIDES, "gradient = gradient / state.scale"),
             (f"    for gradient in gradients:\n        {DIVIDES}",
              f"    optimizer.step()\n    for gradient in gradients:\n        {DIVIDES}",
              "expect true ones\n    optimizer.step()", "expect true ones")),
        Slip("You divide twice: once is enough.", (DIVIDES, f"{DIVIDES}.div_(state.scale)")),
        Slip("A gradient below 1e-8 was lost: fp16 can't hold it. Multiply the loss by the scale, "
             "before backward.", (SCALED, "(loss / state.scale)", DIVIDES,
                                  "gradient.mul_(state.scale)"),
             (SCALED, "loss", "gradient.isfinite()", "(gradient * state.scale).isfinite()",
              DIVIDES, "pass")),
        Slip("Look before you step: if any gradient is inf or NaN, skip the step.",
             (SKIPS, "optimizer.step()\n        return"), (OVERFLOWS, "if False:")),
        Slip("Check every number of every gradient: a single one that is not finite is enough to "
             "skip the step.",
             (FINITE, "gradients[0].isfinite().all()"), (FINITE, "gradients[-1].isfinite().all()"),
             (FINITE, "all(gradient.isfinite().any() for gradient in gradients)"),
             (FINITE, "any(gradient.isfinite().all() for gradient in gradients)")),
        Slip("Use the gradients of all param_groups.",
             ("for group in optimizer.param_groups", "for group in optimizer.param_groups[:1]")),
        Slip("isinf() misses NaN, and NaN is never larger than a limit. isfinite() is False for "
             "both infinity and NaN.",
             (FINITE, "all(not gradient.isinf().any() for gradient in gradients)"),
             (OVERFLOWS, "if any((gradient.abs() > 65504).any() for gradient in gradients):")),
        Slip("-inf is not finite either: use isfinite(), or abs() before you compare.",
             (OVERFLOWS, "if any((gradient > 65504).any() or gradient.isnan().any()\n"
              "           for gradient in gradients):")),
        Slip("Start each step from zero gradients: optimizer.zero_grad() before backward.",
             ("    optimizer.zero_grad()\n    (loss", "    (loss",
              SKIPS, "return")),
        Slip("After an overflow, halve the scale.", ("scale=state.scale / 2, ", "")),
        Slip("After an overflow, the new scale is half the current one.",
             (HALVED, "scale=2.0**11, clean_steps=0"),
             (HALVED, "scale=state.scale / 4, clean_steps=0"), (HALVED, "scale=1.0, clean_steps=0"),
             (HALVED, "scale=state.scale * 2, clean_steps=0"),
             (HALVED, "scale=state.scale / 2**11, clean_steps=0")),
        Slip("The scale doubles too soon: an overflow must set clean_steps back to 0.",
             (HALVED, "scale=state.scale / 2"),
             (HALVED, "scale=state.scale / 2, clean_steps=state.clean_steps + 1")),
        Slip("The scale doubles too soon: it must double only after `interval` clean steps in a "
             "row.",
             (f"if {REACHED}", "if False"), (REACHED, "state.clean_steps + 2 < state.interval")),
        Slip("The scale doubles too late: the clean step that completes the `interval` counts as "
             "well.",
             (REACHED, "state.clean_steps < state.interval"),
             (REACHED, "state.clean_steps + 1 <= state.interval")),
        Slip("The scale doubles too soon: doubling must set clean_steps back to 0.",
             (DOUBLED, DOUBLED.replace("=0", "=state.clean_steps + 1"))),
        Slip("After `interval` clean steps the scale doubles; after `interval` more, it must "
             "double again.",
             (REACHED, "state.clean_steps + 1 != state.interval",
              DOUBLED, DOUBLED.replace("=0", "=state.clean_steps + 1"))),
        Slip("Doubling sets clean_steps to 0, not to 1: the step that doubles the scale belongs to "
             "the interval just completed.", (DOUBLED, DOUBLED.replace("=0", "=1"))),
        Slip("The scale never doubles. Count clean steps in state.clean_steps, and double when "
             "they reach state.interval.",
             (COUNTS, "clean_steps=state.clean_steps"), (REACHED, "True")),
        Slip("After `interval` clean steps, multiply the scale by 2.",
             (DOUBLED, DOUBLED.replace("* 2", "* 4")), (DOUBLED, DOUBLED.replace("* 2", "+ 2"))),
        Slip("The interval is not a constant: use state.interval.",
             ("< state.interval", "< 3")),
        Slip("Keep nothing between calls in a global or a default argument: count in "
             "state.clean_steps.",
             ("optimizer, state):", "optimizer, state, counted=[]):",
              "    optimizer.zero_grad()\n    (loss", "    optimizer.zero_grad()\n    state = "
              "state._replace(clean_steps=len(counted))\n    (loss",
              f"return state._replace({COUNTS})",
              f"counted.append(1)\n        return state._replace({COUNTS})",
              f"return state._replace({HALVED})",
              f"counted.clear()\n        return state._replace({HALVED})",
              f"return state._replace({DOUBLED})",
              f"counted.clear()\n    return state._replace({DOUBLED})")),
        Slip("Return a LossScale: state._replace(...).",
             ("return state._replace(clean_steps=", "return dict(clean_steps="),
             (f"return state._replace({COUNTS})", "return state.scale")),
    ), hints=(
        "There are three cases: an overflow, a clean step, and the last of `interval` clean steps.",
        "On overflow, skip the step, halve the scale and set clean_steps to 0. Otherwise, divide "
        "the gradients by the scale, step and count; after `interval` clean steps in a row, double "
        "the scale and count from 0.",
        "if not all(g.isfinite().all() for g in gradients): return "
        "state._replace(scale=state.scale / 2, clean_steps=0)",
    ))
