"""Lab 15: alarms that cry wolf."""

from mutants import mutant

from ranklab.cluster.alarm import rule_alarm, sick_rank_alarm
from ranklab.cluster.recordings import SECONDS, SICK, record

WRONG = [mutant(sick_rank_alarm, *edits, says=says, called=called) for *edits, says, called in (
    ("usual = np.sort(x, axis=1)[:, R // 2, None]", "usual = np.sort(x[:1], axis=1)[:, R // 2, "
     "None]", "all slow: the file system", "own_past"),
    ("before = x[-8:], np.median(x[:-8], axis=0)", "before = x[-8:], 0",
     "imbalance: the last ranks have", "others_only"),
    ("steady = np.sort(now, axis=0)[1]", "steady = np.sort(now, axis=0)[-1]", "decide by several",
     "one_scrape"),
    ("np.minimum((errors > 0)", "np.maximum((errors > 0)", "ECC once.*do not go on",
     "count_of_errors"),
    ("for name in (ECC, SYMBOLS):", "for name in (ECC,):", "bad link.*counter of its own",
     "no_link"),
    ("x = np.where(np.isnan(x), usual, x)", "metrics[name][-40:] = np.where(np.isnan(x), usual, x)",
     "are changed", "in_place"),
)]  # fmt: skip


def sick_rank_alarm__the_rule(metrics):
    """0.88 is asked for"""
    return rule_alarm(metrics)


def sick_rank_alarm__by_heart(metrics):
    """drawn just now.*runs that it can know"""
    known = {run.metrics[SECONDS][0].tobytes(): run for run in BOOK}
    run = known.get(metrics[SECONDS][0].tobytes())
    return run.sick[0] if run and len(metrics[SECONDS]) > run.onset else None


BOOK = [record(kind, seed) for kind in SICK for seed in range(9001, 9004)]
