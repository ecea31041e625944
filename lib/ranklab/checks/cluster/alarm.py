"""The check of sick_rank_alarm, the open exercise: recordings that the lab has not shown."""

import numbers
from collections import Counter

import numpy as np

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Exercise
from ranklab.cluster.alarm import rule_alarm, score, sick_rank_alarm
from ranklab.cluster.recordings import HEALTHY, SECONDS, SICK, recordings

SEEDS, REACH = range(9001, 9004), 0.94
MISSED = {"hot GPU": "Its clock falls, beside the other GPUs' clocks; its steps get longer.",
          "bad link": "It shows in a counter of its own, and in no rank's time until the "
                      "collective.",
          "dying memory": "It shows in a counter alone, until the GPU is lost.",
          "slow loader": "A whole host is slower than before, so half of a small run may be.",
          "slow host CPU": "8% are enough: beside the other ranks, and beside its own past."}
FALSE = {"calm": "Noise and pauses: decide by several scrapes, not by one.",
         "imbalance": "Compare a rank with its own past, too.",
         "slow start": "It gets better: decide by what gets worse.",
         "neighbours": "Single long steps pass: wait until most scrapes of some minutes are long.",
         "warm rack": "Warm is not sick: what does the heat do to the clock?",
         "ECC once": "Errors at one moment that do not go on: count the scrapes in which there are "
                     "new ones.",
         "all slow": "Compare with the other ranks of the same scrape.",
         "restart": "A counter that has fallen began again at 0; first steps compile."}
BEFORE = "It names another rank, or it comes before the onset."


def check_sick_rank_alarm(sick_rank_alarm):
    runs = recordings(SEEDS)
    _obeys(sick_rank_alarm, runs[0])
    yield "a rank or None, from the first scrape on, where scrapes failed; metrics are as before"
    found = score(sick_rank_alarm, runs)
    often = Counter(found.false).most_common(3)
    most = max(1, len(runs) // 50)
    if len(found.false) > most:
        kind = "calm" if "calm" in found.false else often[0][0]
        words = ", ".join(f"{count} of kind {name!r}" for name, count in often)
        expect(False, f"{len(found.false)} false alarms in {len(runs)} runs, {most} may be: "
               f"{words}", f"{kind}: {(HEALTHY | SICK)[kind]}. {FALSE.get(kind, BEFORE)}")
    yield f"{len(found.false)} false alarms in {len(runs)} runs"
    library = score(answer, runs)
    means = {kind: sum(late) / len(late) for kind, late in found.seconds.items()}
    kind = max(means, key=lambda kind: means[kind] - np.mean(library.seconds[kind]))
    expect(found.value >= REACH * library.value, f"the score is {found.value:.3f}, "
           f"{REACH * library.value:.3f} is asked for; seconds to the alarm: " + ", ".join(
               f"{name} {late:.0f}" for name, late in means.items()),
           f"{kind}: {SICK[kind]}. {MISSED[kind]}")
    yield f"yours: {found}"
    yield f"the library's: {library}"
    yield f"straggler_rule alone: {score(rule_alarm, runs)}"


def _obeys(alarm, run):
    """Each answer for one run is a rank or None."""
    ranks = run.metrics[SECONDS].shape[1]
    for end in (1, 2, 5, 25, len(run.metrics[SECONDS])):
        given = {name: each[:end].copy() for name, each in run.metrics.items()}
        with np.errstate(all="ignore"):
            rank = alarm(given)
        is_rank = isinstance(rank, numbers.Integral) and not isinstance(rank, bool)
        expect(rank is None or is_rank and 0 <= rank < ranks, f"after {end} scrapes it returns "
               f"{rank!r}", f"None, or a rank: 0 .. {ranks - 1}.")
        expect(given.keys() == run.metrics.keys() and all(
            np.array_equal(each, run.metrics[name][:end], equal_nan=True)
            for name, each in given.items()), "the metrics are changed", "Work on copies.")


answer = sick_rank_alarm
ALARM = (
    Exercise(sick_rank_alarm, check_sick_rank_alarm, hints=(
        "With what do you compare a rank's number: with the other ranks now, or with its own past? "
        "What goes wrong with each of the two alone?",
        "Both: first the distance from the median rank of each scrape, then how it has changed. "
        "Ask for most of the last scrapes, not for a mean. Counters: in how many of the last "
        "scrapes has one grown?",
        "x = x / the row's median; now = the second smallest of the last 8; before = the median of "
        "what came before; an alarm where now - before is above 5% and above the spread of the "
        "last 8. Look at the kinds in help(recordings) one by one.",
    )),
)
