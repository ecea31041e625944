"""Activation checkpointing: keep only the input, and recompute the rest in backward.

Not to be confused with a checkpoint on disk (ranklab/checkpoint).
"""

import contextlib
from functools import partial

import torch


def checkpointed(function, *inputs):
    """Compute function(*inputs), with all its gradients, but keep only `inputs` for backward.

    At least one input must require a gradient; the others need not. function may return a tuple.
    Real one: torch.utils.checkpoint, which also restores autocast, stops the second forward early
    and works under torch.compile.
    Cost: one more forward of `function`.
    Paper: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost
    Lab: 01
    """

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.random = random_state()  # dropout must drop the same numbers again
            ctx.save_for_backward(*inputs)
            return function(*inputs)  # autograd is off inside a Function: nothing is kept

        @staticmethod
        def backward(ctx, *gradients):
            leaves = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
            with torch.enable_grad(), random_replayed(ctx.random):
                outputs = function(*leaves)
            torch.autograd.backward(outputs, gradients)  # fills .grad of leaves and of the weights
            return tuple(x.grad for x in leaves)

    return Recompute.apply(*inputs)


def checkpoint_blocks(model, checkpoint=checkpointed):
    """Make each block of `model` recompute itself in backward, without changes to the model's code.

    checkpoint: checkpointed, or torch.utils.checkpoint.checkpoint with use_reentrant=False.
    """
    def wrapped(forward):
        return lambda x, positions=None: checkpoint(partial(forward, positions=positions), x)

    for block in model.blocks.values():
        block.forward = wrapped(block.forward)
    return model


def random_state():
    """Return the state of torch's random generators on the CPU and on this process's GPU."""
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return {"cpu": torch.get_rng_state(), "gpu": gpu}


def set_random_state(state):
    """Set torch's random generators to `state`."""
    torch.set_rng_state(state["cpu"])
    if state["gpu"] is not None:
        torch.cuda.set_rng_state(state["gpu"])


@contextlib.contextmanager
def random_replayed(state):
    """In the block, repeat the random numbers that followed `state`; then continue as before."""
    present = random_state()
    set_random_state(state)
    try:
        yield
    finally:
        set_random_state(present)
