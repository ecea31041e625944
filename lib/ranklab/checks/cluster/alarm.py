"""The check of sick_rank_alarm, the open exercise, on recordings that the lab has not shown."""

import numbers
import secrets
import warnings
from collections import Counter
from functools import cache

import numpy as np

from ranklab.checks.exercise import Exercise
from ranklab.checks.looks import expect
from ranklab.checks.prover import Slip
from ranklab.cluster.alarm import LEAST, LEAST_NEW, rule_alarm, score, sick_rank_alarm
from ranklab.cluster.recordings import HEALTHY, SECONDS, SICK, recordings

SEEDS, MOST_FALSE = range(9001, 9004), 1
MISSED = {"hot GPU": "Its clock falls below the other GPUs' clocks, and its steps get longer.",
          "bad link": "A bad link shows only in its own counter, not in any rank's time.",
          "dying memory": "It shows only in a counter, until the GPU is lost.",
          "slow loader": ("A whole host is slower than before, and in a small run one host can be "
                          "half of the ranks."),
          "slow host CPU": "Its steps are perhaps only 8% longer: compare them with the other "
                           "ranks' and with its own past."}
FALSE = {"calm": "There are noise and pauses: decide by several scrapes, not by one.",
         "imbalance": "",  # the sentence about the kind says it
         "slow start": "It gets better by itself: raise an alarm only if something gets worse.",
         "neighbours": ("Isolated long steps pass: wait until most scrapes over several minutes "
                        "show long steps."),
         "warm rack": "A warm GPU is not a sick GPU: what does the heat do to its clock?",
         "ECC once": "These errors do not continue: how many scrapes show new ones?",
         "all slow": "",
         "restart": ("A counter that falls has restarted at 0, and the first steps after a restart "
                     "are slow because they compile.")}
ASKED, COPIES = f"{LEAST} is required", "Work on copies."
KNOWN = "It does well only on runs that it may have seen before, not on new ones."


def check_sick_rank_alarm(sick_rank_alarm):
    runs = recordings(SEEDS)
    _obeys(sick_rank_alarm, runs[0])
    yield "a rank or None from the first scrape on, also with failed scrapes; metrics are unchanged"
    old = score(sick_rank_alarm, runs)
    kinds = Counter(old.false)
    worst = "calm" if "calm" in kinds else max(kinds, key=kinds.get, default="")
    expect(len(old.false) <= MOST_FALSE, f"{len(old.false)} false alarms in {len(runs)} runs, "
                                           f"at most {MOST_FALSE} allowed: {dict(kinds)}",
           f"{worst}: {(HEALTHY | SICK).get(worst)}. "
           f"{FALSE.get(worst, 'It names another rank, or it comes before the onset.')}")
    means = {kind: round(sum(late) / len(late)) for kind, late in old.seconds.items()}
    late = max(means, key=means.get)
    expect(old.value >= LEAST, f"the score is {old.value:.3f}, {ASKED}; seconds "
           f"to the alarm: {means}", f"{late}: {SICK[late]}. {MISSED[late]}")
    yield str(old)
    new = score(sick_rank_alarm, recordings(secrets.randbits(32) for _ in range(2)))
    expect(new.value >= LEAST_NEW, f"on runs drawn just now: {new}; {LEAST_NEW} is required, and "
                                   f"on the others it is {old.value:.3f}",
           KNOWN)
    yield f"as good on {len(new.points)} recordings that were drawn just now"


def _obeys(alarm, run):
    """Check that each answer for one run is a rank or None."""
    ranks = run.metrics[SECONDS].shape[1]
    for end in (1, 2, *range(5, len(run.metrics[SECONDS]), 7)):
        metrics = {name: each[:end].copy() for name, each in run.metrics.items()}
        with warnings.catch_warnings(action="ignore"):
            rank = alarm(metrics)
        is_rank = isinstance(rank, numbers.Integral) and not isinstance(rank, bool)
        expect(rank is None or is_rank and 0 <= rank < ranks, f"after {end} scrapes it returns "
               f"{rank!r}", f"Return None or a rank from 0 to {ranks - 1}.")
        expect(metrics.keys() == run.metrics.keys() and all(
            np.array_equal(each, run.metrics[name][:end], equal_nan=True)
            for name, each in metrics.items()), "the metrics are changed", COPIES)


@cache
def _known():
    return {run.metrics[SECONDS][0].tobytes(): run for run in recordings(SEEDS)}


def by_heart(metrics):
    run = _known().get(metrics[SECONDS][0].tobytes())
    return run.sick[0] if run and run.sick and len(metrics[SECONDS]) > run.onset else None


ALARM = Exercise(
    sick_rank_alarm, check_sick_rank_alarm, mistakes=(
        Slip(HEALTHY["all slow"], ("np.sort(x, axis=1)", "np.sort(x[:1], axis=1)")),
        Slip(HEALTHY["imbalance"], ("np.median(x[:-8], axis=0)", "0")),
        Slip(FALSE["calm"], ("np.sort(now, axis=0)[1]", "np.sort(now, axis=0)[-1]")),
        Slip(FALSE["ECC once"], ("np.minimum((errors > 0)", "np.maximum((errors > 0)")),
        Slip(MISSED["bad link"], ("for name in (ECC, SYMBOLS):", "for name in (ECC,):")),
        Slip(COPIES, ("x = np.where(np", "metrics[name][-40:] = np.where(np")),
        Slip(ASKED, rule_alarm),
        Slip(KNOWN, by_heart),
    ), hints=(
        "Do you compare a rank's number with the other ranks now, or with its own past? What goes "
        "wrong with either comparison alone?",
        "Use both: first the distance from the median rank of each scrape, then how it has "
        "changed. Require it in most of the last scrapes, not just in their mean. For counters: in "
        "how many of the last scrapes have they grown?",
        "x = x / the row's median; now = the second smallest of the last 8; before = the median of "
        "what came before; raise an alarm where now - before is above 5% and above the spread of "
        "the last 8. Look at the kinds in help(recordings) one by one."))
