"""A straggler: all ranks wait for the slowest one, in each step.

Measure the seconds until a rank reaches the collective. After the collective the times of all ranks
are equal, because the fast ones have waited in it.
"""


def find_straggler(seconds, threshold=1.2, recent=32):
    """Return the ranks that are slow now, the slowest first; [] if there are none.

    A rank is slow if it takes more than `threshold` times as long as a typical rank in the same
    step, in more than half of the last `recent` steps. So there is no alarm for noise, for an
    occasional pause (garbage collection, a checkpoint), or for a step in which all ranks are
    slow. The slowest has the largest median of its time over the typical one's.
    At most half of the ranks are slow. Of two ranks, the slower one is compared with the other.
    seconds: (steps, ranks), each rank's time until it reached the step's collective; not modified.
    Raises: ValueError if `seconds` does not have two dimensions, or is empty.
    Lab: 14
    """
    if seconds.dim() != 2 or not seconds.numel():
        raise ValueError(f"seconds is of shape {tuple(seconds.shape)}, not (steps, ranks)")
    seconds = seconds[-recent:]
    usual = seconds.median(dim=1, keepdim=True).values  # torch takes the lower one of two
    slowness = (seconds / usual).median(dim=0).values  # (ranks,)
    order = slowness.argsort(descending=True).tolist()
    return [rank for rank in order if slowness[rank] > threshold]
