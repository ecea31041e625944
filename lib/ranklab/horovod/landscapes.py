"""What a step takes at each fusion threshold: models and networks by a seed, measured with noise.

By horovod.cost.overlapped_time: low thresholds cost latencies, high ones wait for backward.
"""

import functools
import random
from dataclasses import dataclass

from ranklab.horovod.cost import overlapped_time

CALLS, NOISE, STRAGGLERS, LATE = 300, 0.08, 0.1, 3
SEED = 27  # right answers that we know get 29 or 30 of 30 here; one measurement each 21 to 25
KINDS = {  # where the best threshold lies: latencies and backward, in times of the wire; the range
    "in the middle": (2.0, 1.0, 2**12, 2**28),
    "at the low end": (0.02, 1.0, 2**20, 2**28),
    "at the high end": (20.0, 0.1, 2**14, 2**26),
}


@dataclass
class Landscape:
    """A model on a network: what a step takes at each threshold, without noise."""

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
        """How many times as long as at the best threshold a step takes here."""
        return self.seconds(threshold) / self.best

    def grid(self):
        """60 thresholds from low to high, evenly spaced on a log scale."""
        return [round(self.low * (self.high / self.low) ** (i / 59)) for i in range(60)]

    @functools.cached_property
    def best(self):
        """Seconds at the best threshold of the grid."""
        return min(map(self.seconds, self.grid()))


class Steps:
    """seconds_of(threshold): one step, with noise; one in ten waits for a straggler, three times as
    long (NOISE, STRAGGLERS, LATE). `asked` holds all thresholds that were measured.
    """

    def __init__(self, landscape, calls=CALLS):
        self.landscape, self.calls, self.asked = landscape, calls, []

    def __call__(self, threshold):
        self.asked.append(threshold)
        draw = random.Random(f"{SEED} {self.landscape.seed} {len(self.asked)}")
        late = LATE if draw.random() < STRAGGLERS else 1
        return self.landscape.seconds(threshold) * draw.gauss(1, NOISE) * late

    def tuned(self, tune):
        """What `tune` chooses here."""
        return tune(self, self.landscape.low, self.landscape.high, self.calls)
