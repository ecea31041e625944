"""A guard against gradients that grow with the number of ranks: two norms, and a sentence.

The mean over the ranks of what each has for the same examples is what one rank has for them. If it
is not, something divides or multiplies by the number of ranks once too often.
"""

import copy

import torch

TOLERANCE = 0.01


class GradientsGrow(RuntimeError):
    """The gradient depends on how many ranks compute it."""


def gradient_norm(model, step):
    """The norm of the gradient that `step(model, optimizer)` goes along; `model` is unchanged.

    With SGD at lr=1 the weights move by the gradient itself: as it is in the end, whatever the
    training loop has done with it, and wherever.
    """
    moved = copy.deepcopy(model)
    step(moved, torch.optim.SGD(moved.parameters(), lr=1.0))
    pairs = zip(model.parameters(), moved.parameters())
    return float(torch.stack([(a.detach() - b.detach()).norm() for a, b in pairs]).norm())


def guard_gradient_scale(one_rank, all_ranks, ranks):
    """Nothing, where the norm on all ranks is that on one rank, for the same examples on each.

    error  GradientsGrow, with the factor and what is likely behind it; a gradient of zero
    """
    if one_rank == 0:
        raise ValueError("the gradient of these examples is zero on one rank: take others")
    factor = all_ranks / one_rank
    if abs(factor - 1) <= TOLERANCE:
        return
    causes = {ranks: "multiplied by the ranks, or summed and not averaged",
              1 / ranks: "divided by the ranks twice"}  # fmt: skip
    cause = next((text for times, text in causes.items() if abs(factor / times - 1) <= TOLERANCE),
                 "scaled by something else")
    raise GradientsGrow(f"the same examples give a gradient {factor:.3g} times as long on {ranks} "
                        f"ranks as on one: {cause}")
