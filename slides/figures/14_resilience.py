"""The figures of the deck 14_resilience.md."""
import torch

from ranklab import launch
from ranklab.clinic.run_state import CASES
from ranklab.formulas.resilience import GPU_HOURS
from ranklab.plots import clinic, resilience as plots
from ranklab.resilience import goodput, optimal_interval, recovery_policy
from ranklab.resilience.cluster import run_policy
from ranklab.resilience.gaps import random_gaps, simulate
from ranklab.resilience.lemons import lemon_nodes, make_job_log
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


def restarts():
    usual = {"data_twice": {"stops": ()}, "old_shard": {"stop": 0}}
    runs = {name.replace("_", " "): (_losses(name, **never), _losses(name))
            for name, never in usual.items()}
    return clinic.restarts(runs, stop=8, title=""), 7.4, 2.9


def _losses(disease, **settings):
    program, = (case.broken() for case in CASES if case.disease == disease)
    losses = launch(lambda: program(**settings), ranks=4)[0]["losses"]
    return [round(loss, 3) for loss in losses]  # further digits are the CPU's


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


def lemons():
    counts = {"5% for each node": {}, "5% for all nodes": {}}
    for days in (14, 28, 56, 112):
        log, known = make_job_log(days=days)
        for rule, number in zip(counts, (0.05 * 2000, 0.05)):
            named = {*lemon_nodes(log, number)}
            counts[rule][days] = len(named & {*known}), len(named - {*known})
    return plots.named_nodes(counts, title=""), 8.2, 2.9
