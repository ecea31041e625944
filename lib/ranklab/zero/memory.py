"""What a stage holds and what it sends, before it is run."""

import math
from typing import NamedTuple


class States(NamedTuple):
    """Bytes of the states of a model on one rank."""

    parameters: int
    gradients: int
    optimizer_state: int

    @property
    def total(self):
        return sum(self)


def zero_memory(stage, parameters, ranks, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12):
    """The States that each rank holds between two steps, after backward and before zero_grad().

    The bytes are those of one number. By default it is Adam in mixed precision: 16-bit parameters
    and gradients; master weights and two moments in float32. Where `ranks` does not divide, this is
    the fullest rank. Not here: activations, buckets on their way, units that are whole for a while.
    stage  0 (data parallelism) to 3
    paper  Rajbhandari et al. 2020, ZeRO, figure 1
    lab    06
    """
    if stage not in range(4):
        raise ValueError(f"stage={stage} must be 0, 1, 2 or 3")
    own = math.ceil(parameters / ranks)
    return States(parameter_bytes * (own if stage >= 3 else parameters),
                  gradient_bytes * (own if stage >= 2 else parameters),
                  optimizer_bytes * (own if stage >= 1 else parameters))


def zero_traffic(stage, nbytes, ranks, resident_bytes=0):
    """The bytes that each rank sends in one step, for `nbytes` of parameters and as many of
    gradients.

    Stages 0 to 2: what one all-reduce of the gradients sends. Stage 3: 1.5 times that, but for
    `resident_bytes` of parameters, which are gathered once a step and not twice.
    lab    06
    """
    if stage not in range(4):
        raise ValueError(f"stage={stage} must be 0, 1, 2 or 3")
    once = (ranks - 1) / ranks
    if stage < 3:
        return 2 * once * nbytes
    return once * (3 * nbytes - resident_bytes)
