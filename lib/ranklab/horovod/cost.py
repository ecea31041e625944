"""The cost of negotiation and fusion, by the model of collectives; and the fastest threshold.

Horovod's own autotuner (HOROVOD_AUTOTUNE=1) is a Bayesian optimisation with a Gaussian process,
over threshold and cycle time together.
"""

import functools
import math
import random
from dataclasses import dataclass
from statistics import median

import torch

from ranklab.collectives import alpha_beta_time
from ranklab.horovod.fusion import fuse_tensors

CALLS, NOISE, STRAGGLERS, LATE = 300, 0.08, 0.1, 3
SEED = 27  # known right answers get 29 or 30 of 30 here; those that measure once each get 21 to 25
KINDS = {  # the location of the best threshold: latencies and backward, in wire times; the range
    "in the middle": (2.0, 1.0, 2**12, 2**28),
    "at the low end": (0.02, 1.0, 2**20, 2**28),
    "at the high end": (20.0, 0.1, 2**14, 2**26),
}


def fused_time(sizes, threshold, ranks, alpha, beta):
    """Return the seconds of ring all-reduces for tensors of `sizes` bytes.

    Tensors are fused into buffers of at most `threshold` bytes.

    Lab: 05
    """
    return overlapped_time(sizes, threshold, 0.0, ranks, alpha, beta)


def overlapped_time(sizes, threshold, backward, ranks, alpha, beta):
    """Return the seconds from the start of backward until all tensors are reduced, one ring each.

    Tensor i of n is ready after (i + 1)/n of `backward` seconds. A buffer is sent when it is full,
    or at the end of backward. (Simplified: Horovod also sends a partly filled buffer at the end of
    a cycle. So its curve is flatter at high thresholds.)

    Lab: 05
    """
    tensors = [torch.empty(n, dtype=torch.uint8, device="meta") for n in sizes]
    now = 0.0
    for group in fuse_tensors(tensors, threshold):
        ready = backward * (group[-1] + 1) / len(sizes)
        nbytes = sum(sizes[i] for i in group)
        now = max(now, ready) + alpha_beta_time("ring", nbytes, ranks, alpha, beta)
    return now


def negotiation_bytes(tensors, ranks, request_bytes=None):
    """Return the bytes of one cycle in which `tensors` names become ready on all ranks.

    With `request_bytes`, the bytes of one request: the requests that rank 0 receives. Without:
    the cache's bit vector on every rank, with one bit for each name and one that says whether any
    rank has names to send.

    Lab: 05
    """
    if request_bytes is None:
        return math.ceil((1 + tensors) / 8)
    return (ranks - 1) * tensors * request_bytes


def tune_fusion(seconds_of, low, high, calls):
    """Find the threshold, a whole number of bytes from low to high, that makes a step fastest.

    Call seconds_of(threshold), which is noisy, at most `calls` times.

    Measure a coarse grid on a log scale, then a finer one around its best: half of the calls each,
    and the median at each threshold, because a straggler's step would spoil a mean.

    Lab: 05
    """
    measured, half = {}, calls // 2
    for _ in range(2 if half else 0):
        last = max(1, min(8, half - 1))
        grid = [round(low * (high / low) ** (i / last)) for i in range(last + 1)]
        new = [threshold for threshold in dict.fromkeys(grid) if threshold not in measured][:half]
        for threshold in new:
            times = [seconds_of(threshold) for _ in range(half // len(new))]
            measured[threshold] = median(times)
        known = sorted(measured)
        best = known.index(min(known, key=measured.get))
        low, high = known[max(0, best - 1)], known[min(best + 1, len(known) - 1)]
    return min(measured, key=measured.get, default=low)


# --- steps to tune for, by a seed -----------------------------------------------------------------

@dataclass
class Workload:
    """A model on a network: the seconds of a step at each threshold, without noise.

    They come from overlapped_time: low thresholds cost latency, high ones wait for backward.
    """

    seed: int

    def __post_init__(self):
        draw = random.Random(self.seed)
        self.kind = list(KINDS)[self.seed % 3]
        latencies, backward, self.low, self.high = KINDS[self.kind]
        large = draw.choice((2**17, 2**18, 2**19)) << 3 * (self.seed % 3 > 0)
        self.sizes = [large, large // 1024, large // 256, large] * draw.randint(24, 40)
        self.ranks, self.beta = draw.choice((8, 16, 64)), 1 / draw.choice((5e9, 10e9, 25e9))
        wire, steps = 2 * sum(self.sizes) * self.beta, 2 * (self.ranks - 1) * len(self.sizes)
        self.alpha = draw.uniform(0.7, 1.4) * latencies * wire / steps
        self.backward, self.known = backward * wire, {}

    def seconds(self, threshold):
        if threshold not in self.known:
            self.known[threshold] = overlapped_time(
                self.sizes, threshold, self.backward, self.ranks, self.alpha, self.beta)
        return self.known[threshold]

    def score(self, threshold):
        """Return a step's time at `threshold`, divided by the time at the best threshold."""
        return self.seconds(threshold) / self.best

    def grid(self):
        """Return 60 thresholds from low to high, evenly spaced on a log scale."""
        return [round(self.low * (self.high / self.low) ** (i / 59)) for i in range(60)]

    @functools.cached_property
    def best(self):
        """Seconds of a step at the best threshold of the grid."""
        return min(map(self.seconds, self.grid()))


class NoisySteps:
    """A function seconds_of(threshold) that measures one step, with noise.

    One step in ten waits for a straggler and takes three times as long (NOISE, STRAGGLERS, LATE).
    `asked` holds all thresholds that were measured.
    """

    def __init__(self, workload, calls=CALLS):
        self.workload, self.calls, self.asked = workload, calls, []

    def __call__(self, threshold):
        self.asked.append(threshold)
        draw = random.Random(f"{SEED} {self.workload.seed} {len(self.asked)}")
        late = LATE if draw.random() < STRAGGLERS else 1
        return self.workload.seconds(threshold) * draw.gauss(1, NOISE) * late

    def tuned(self, tune):
        """Return the threshold that `tune` chooses from these steps."""
        return tune(self, self.workload.low, self.workload.high, self.calls)
