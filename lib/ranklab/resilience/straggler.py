"""A straggler: all ranks wait for the slowest one, in each step.

The seconds are those until a rank reaches the collective. After it all ranks have the same time:
the fast ones have waited in it.
"""

import torch


def find_straggler(seconds, threshold=1.2, recent=32):
    """The ranks that are slow now, the slowest first; [] where there is none.

    A rank is slow where it takes more than `threshold` times as long as the ranks of the same step
    usually do, in most of the last `recent` steps. So noise is no alarm, nor a pause now and then
    (garbage collection, a checkpoint), nor a step in which all are slow. At most half of the ranks
    are slow; two of two differ by more than `threshold`.
    seconds  (steps, ranks): until the rank reached the collective of the step; not changed
    error    ValueError where it is not of two dimensions, or is empty
    lab      14
    """
    if seconds.dim() != 2 or not seconds.numel():
        raise ValueError(f"seconds is of shape {tuple(seconds.shape)}, not (steps, ranks)")
    seconds = seconds[-recent:]
    usual = seconds.median(dim=1, keepdim=True).values  # of an even number torch takes the lower
    slowness = (seconds / usual).median(dim=0).values  # (ranks,)
    order = slowness.argsort(descending=True).tolist()
    return [rank for rank in order if slowness[rank] > threshold]
