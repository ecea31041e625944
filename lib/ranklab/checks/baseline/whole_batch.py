"""A batch and the results of a step on it, shared by three checks of lab 01."""

import contextlib
from numbers import Real

import torch

from ranklab.basics.targets import IGNORE
from ranklab.checks.prover import Told
from ranklab.checks.trial import is_near


@contextlib.contextmanager
def one_thread():
    """Limit torch to one thread inside the block.

    For matrices as small as these, a second thread costs more than it gains.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def batch(config, rows, tokens, ignored=()):
    """Draw (inputs, targets); row i has ignored[i] targets that are IGNORE."""
    generator = torch.Generator().manual_seed(rows + tokens)
    inputs, targets = torch.randint(config.vocab_size, (2, rows, tokens), generator=generator)
    for row, count in enumerate(ignored):
        targets[row, :count] = IGNORE
    return inputs, targets


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()}


def told_gradients(model):
    return {f"the gradient of {name}": Told(grad, times_right)
            for name, grad in gradients(model).items()}


def number_of(loss):
    """Return a loss as a number, whatever holds it; anything else is returned unchanged."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.item()
    return float(loss) if isinstance(loss, Real) else loss


def times_right(got, due):
    """Return the factor by which a gradient is wrong, if it is wrong by a factor."""
    if not isinstance(due, torch.Tensor) or not isinstance(got, torch.Tensor) or (
            got.shape != due.shape or not due.any()):
        return ""
    factor = (got * due).sum() / due.square().sum()
    if not factor or not is_near(got, factor * due):
        return "zeros" if not got.any() else ""
    return f"{factor.item():.4g} times what is right"
