"""The figures of the deck 14_resilience.md."""
import torch

from ranklab.formulas.resilience import GPU_HOURS
from ranklab.plots import resilience as plots
from ranklab.resilience import goodput, optimal_interval, recovery_policy
from ranklab.resilience.cluster import run_policy
from ranklab.resilience.gaps import random_gaps, simulate
from ranklab.resilience.policy import daly_policy, oracle
from ranklab.resilience.stream import Documents, PackedStream
from ranklab.resilience.traces import DAY, HOUR, REGIMES, make_trace


def interruptions():
    return plots.interruptions(title=""), 7.6, 4.2


def intervals():
    mean = GPU_HOURS / 16384 * HOUR
    return plots.intervals(goodput, optimal_interval, simulate, random_gaps(mean, 3000), mean,
                           title=""), 7.8, 3.2


def policies():
    scores = {}
    for name, regime in REGIMES.items():
        trace, seconds = make_trace(regime), regime.days * DAY
        scores[name] = {"waiting, Daly": run_policy(daly_policy, regime.job, trace, seconds),
                        "the library's": run_policy(recovery_policy, regime.job, trace, seconds),
                        "oracle": oracle(regime.job, trace, seconds)[0]}
    return plots.policies(scores, title=""), 8.2, 3.2


def windows():
    def read(ranks, first, steps):
        lives = []
        for rank in range(ranks):
            documents = Documents(torch.arange(2000).split(40))
            stream = PackedStream(documents, 12, 12, rank=rank, ranks=ranks)
            stream.load_state_dict({"step": first})
            lives.append([[*map(tuple, stream.next().tolist())] for _ in range(steps)])
        return lives

    own = 8 * 12 // 4 * 3 // 12  # the step that three ranks take for the ninth
    lives = {"undisturbed": [read(4, 0, 12)], "the step": [read(4, 0, 8), read(3, 8, 4)],
             "own count": [read(4, 0, 8), read(3, own, 4)]}
    whole = [window for windows in read(1, 0, 12)[0] for window in windows]
    return plots.windows_taken(lives, whole, 12, title=""), 8.2, 3.0
