"""An alarm that names the sick rank from all metrics of a run, and the score of an alarm."""

import math
import warnings
from dataclasses import dataclass, field

import numpy as np

from ranklab.cluster.recordings import CLOCK, DATA, ECC, SCRAPE, SECONDS, SYMBOLS

LIMIT = 900.0  # seconds: a later alarm is worth nothing
LEAST, LEAST_NEW = 0.88, 0.75  # scores that the check asks for


def sick_rank_alarm(metrics):
    """Return the rank that is sick, or None while no rank is.

    It is called at each scrape, with everything scraped from a run so far. If a whole host is sick,
    any of its ranks counts.

    metrics  {name: (scrapes, ranks)}, and train_mfu: (scrapes,); a scrape every 15 s, NaN if it
             failed. Do not modify them. Errors are counters. See recordings for the names, and for
             what may happen to a run
    counted  the seconds from onset to alarm, and false alarms: in a healthy run, before the onset,
             or about a healthy rank. The first alarm ends a run
    least    a Score of 0.88 on 39 recordings that the lab has not shown, with at most one false
             alarm; a Score of 0.75 on 26 recordings that the check draws when it runs
    lab      15, open
    """
    T, R = metrics[SECONDS].shape
    if T < 20:
        return None
    evidence, step = [], np.nanmedian(metrics[SECONDS][-8:])  # (ranks,) of each metric; > 1: sick
    for name, sign, limit in ((SECONDS, 1, 0.05), (DATA, 1, 0.05), (CLOCK, -1, 0.025)):
        x = sign * metrics[name][-40:]
        usual = np.sort(x, axis=1)[:, R // 2, None]  # what all ranks share is no sickness
        x = np.where(np.isnan(x), usual, x)
        x = (x - usual) / (step if name == DATA else np.abs(usual))
        now, before = x[-8:], np.median(x[:-8], axis=0)
        steady = np.sort(now, axis=0)[1]  # not only now and then
        evidence.append((steady - before) / np.maximum(limit, 1.5 * now.std(axis=0)))
    for name in (ECC, SYMBOLS):
        errors = np.maximum(np.nan_to_num(np.diff(metrics[name][-11:], axis=0)), 0)  # restarts
        evidence.append(np.minimum((errors > 0).sum(axis=0) / 3, errors.sum(axis=0) / 5))
    worst = np.max(evidence, axis=0)
    return int(worst.argmax()) if worst.max() > 1 else None


def rule_alarm(metrics, factor=1.2, minutes=5):
    """Return the rank that straggler_rule finds slow in these metrics; None if there is none.

    The step times compared are means over four scrapes.
    """
    count = int(60 * minutes / SCRAPE) + 1
    if len(metrics[SECONDS]) < count + 3:
        return None
    recent = metrics[SECONDS][-count - 3:]
    means = sum(np.nan_to_num(recent[i:i + count], nan=np.nanmedian(recent)) for i in range(4))
    slow = (means / np.median(means, axis=1, keepdims=True)).min(axis=0)
    return int(slow.argmax()) if slow.max() > factor else None


@dataclass
class Score:
    """The worth of an alarm on some recordings.

    seconds: from onset to alarm for each sick run, or LIMIT if no alarm came by then
    false: kinds of the runs with a false alarm
    value: the mean over all runs: 1 - seconds / LIMIT for a sick run, 1 for a healthy run, 0 with a
        false alarm
    """

    seconds: dict = field(default_factory=dict)  # kind -> [seconds, ...]
    false: list = field(default_factory=list)
    points: list = field(default_factory=list)

    @property
    def value(self):
        return sum(self.points) / len(self.points)

    @property
    def mean_seconds(self):
        delays = [delay for of_kind in self.seconds.values() for delay in of_kind]
        return sum(delays) / len(delays) if delays else math.nan

    def __str__(self):
        return (f"{self.mean_seconds:.0f} s to the alarm on average, {len(self.false)} false of "
                f"{len(self.points)} runs; score {self.value:.3f}")


def play(alarm, recording):
    """Return (scrape, rank) of the first alarm; (None, None) if there is none."""
    with warnings.catch_warnings(action="ignore"):  # of columns that are all NaN
        for scrape in range(len(recording.metrics[SECONDS])):
            rank = alarm({name: values[:scrape + 1]
                          for name, values in recording.metrics.items()})
            if rank is not None:
                return scrape, rank
    return None, None


def score(alarm, recordings):
    """Return the Score of `alarm`, a function like sick_rank_alarm."""
    total = Score()
    for run in recordings:
        scrape, rank = play(alarm, run)
        is_false = rank is not None and (rank not in run.sick or scrape < run.onset)
        delay = LIMIT if scrape is None or is_false else min(
            LIMIT, SCRAPE * (scrape - run.onset))
        if run.sick:
            total.seconds.setdefault(run.kind, []).append(delay)
        if is_false:
            total.false.append(run.kind)
        total.points.append(0.0 if is_false else 1 - delay / LIMIT if run.sick else 1.0)
    return total
