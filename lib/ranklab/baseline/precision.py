"""Sixteen bits: bf16 has the range of float32; fp16 has not, so its loss must be scaled."""

from typing import NamedTuple


class LossScale(NamedTuple):
    """The scale of the loss, and the number of steps in a row without an overflow."""

    scale: float = 2.0**16
    clean_steps: int = 0
    interval: int = 2000  # the scale doubles after this many clean steps in a row


def scale_loss(loss, optimizer, state):
    """Step `optimizer` with the true gradients of `loss`, or skip the step if scaled ones overflow.

    Real one: torch.amp.GradScaler, with the same rule.
    Returns: the next LossScale (halved, kept or doubled).
    Paper: Micikevicius et al. 2018, Mixed Precision Training
    Lab: 01
    """
    optimizer.zero_grad()
    (loss * state.scale).backward()  # small gradients leave fp16's blind spot near zero
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not all(gradient.isfinite().all() for gradient in gradients):
        optimizer.zero_grad()
        return state._replace(scale=state.scale / 2, clean_steps=0)
    for gradient in gradients:
        gradient.div_(state.scale)  # before clipping and before the step, which expect true ones
    optimizer.step()
    if state.clean_steps + 1 < state.interval:
        return state._replace(clean_steps=state.clean_steps + 1)
    return state._replace(scale=state.scale * 2, clean_steps=0)
