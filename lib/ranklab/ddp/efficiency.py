"""How well a job scales: the share of perfect speed-up that it achieved."""


def scaling_efficiency(seconds, kind):
    """Return {ranks: efficiency} for {ranks: seconds per step}, in increasing order of ranks.

    The smallest number of ranks is the baseline, with efficiency 1.

    kind   "strong": the same total batch, so R ranks should take 1/R of the time;
           "weak": the same batch per rank, so any number of ranks should take the same time
    Raises: ValueError for any other kind, no measurements, or ranks or seconds that are not
        positive.
    Lab: 04
    """
    if kind not in ("strong", "weak"):
        raise ValueError(f"kind={kind!r} is neither 'strong' nor 'weak'")
    if not seconds or min(seconds) < 1 or min(seconds.values()) <= 0:
        raise ValueError(f"ranks and seconds must be positive, and there at all: {seconds}")
    base = min(seconds)
    perfect = {ranks: base / ranks if kind == "strong" else 1 for ranks in seconds}
    return {ranks: perfect[ranks] * seconds[base] / seconds[ranks] for ranks in sorted(seconds)}
