"""Predict the bytes that a stage of ZeRO holds and sends."""

import math
from typing import NamedTuple


class States(NamedTuple):
    """Bytes of a model's states on one rank."""

    parameters: int
    gradients: int
    optimizer_state: int

    @property
    def total(self):
        return sum(self)


def zero_memory(stage, parameters, ranks, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12):
    """Compute the States that each rank holds after backward and before zero_grad().

    The default is Adam in mixed precision: 16-bit parameters and gradients; master weights and two
    moments in float32. If `ranks` does not divide evenly, the result is for the fullest rank. Not
    counted: activations, buckets being sent, units while they are gathered.
    stage: 0 (data parallelism) to 3.
    parameter_bytes, gradient_bytes, optimizer_bytes: bytes per parameter.
    Paper: Rajbhandari et al. 2020, ZeRO, figure 1
    Lab: 06
    """
    if stage not in range(4):
        raise ValueError(f"stage={stage} must be 0, 1, 2 or 3")
    shard = math.ceil(parameters / ranks)
    return States(parameter_bytes * (shard if stage >= 3 else parameters),
                  gradient_bytes * (shard if stage >= 2 else parameters),
                  optimizer_bytes * (shard if stage >= 1 else parameters))


def zero_traffic(stage, nbytes, ranks, resident_bytes=0):
    """Compute the bytes that each rank sends in one step; not rounded.

    Stages 0 to 2 send as much as one all-reduce of the gradients. Stage 3 sends 1.5 times as much,
    except that `resident_bytes` of parameters are gathered only once a step, not twice.
    nbytes: the size of the parameters; the gradients have the same size.
    Lab: 06
    """
    if stage not in range(4):
        raise ValueError(f"stage={stage} must be 0, 1, 2 or 3")
    share = (ranks - 1) / ranks
    if stage < 3:
        return 2 * share * nbytes
    return share * (3 * nbytes - resident_bytes)
