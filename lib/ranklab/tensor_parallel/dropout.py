"""Random numbers for dropout: the same on all ranks, or different on each rank.

If ranks hold the same tensor, they must drop the same numbers, or their copies differ. If each rank
holds its own heads or tokens, each must drop different numbers, because one process does not use
the same mask for all heads either.
"""

import contextlib

import torch
from torch import nn

from ranklab.engine import device
from ranklab.models.initialise import seed_of

SPREAD = 1_000_003  # runs with adjacent seeds share no rank's seed, up to this many ranks


def dropout_seeds(seed, data_rank, tensor_rank, tensor_ranks):
    """Return (shared, own): the seed for tensors that all tensor ranks hold, and one for the rest.

    shared is the same on all tensor_ranks of one data_rank, and differs between data_ranks, because
    their rows differ. own differs on every rank. All seeds of a run differ from one another.
    Cost: nothing is sent.
    Lab: 08
    """
    first = seed * SPREAD + data_rank * (tensor_ranks + 1)
    return first, first + 1 + tensor_rank


def has_dropout(model):
    """Return whether a module of `model` drops numbers: nn.Dropout, or transformers' attention."""
    return any(module.p if isinstance(module, nn.Dropout) else
               getattr(module, "attention_dropout", 0) for module in model.modules())


@contextlib.contextmanager
def own_random(seed):
    """Seed the generator in the block from `seed` and its current state; then restore it.

    One number is drawn from it first, the same on all ranks of the group. So activation
    checkpointing, which resets the generator, gets the same masks in recomputation.
    """
    draw = torch.randint(2**31, ()).item()  # from the CPU's generator: no wait for a GPU
    place = device()
    with torch.random.fork_rng([place] if place.type != "cpu" else [], device_type=place.type):
        torch.manual_seed(seed_of(seed, draw))  # mixed: the CPU's generator reads 32 bits of it
        yield


def own_random_in(module, seed):
    """Run the module's forward inside own_random(seed), in training."""
    contexts = []

    def enter(module, args):
        contexts.append(own_random(seed) if module.training else contextlib.nullcontext())
        contexts[-1].__enter__()

    def leave(module, args, result):
        contexts.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
