"""Series of training runs, as kept by a Prometheus server that scrapes every 15 s.

Counters jump once a step. A failed scrape, or a process that has ended, leaves a stale mark. After
a restart on different nodes the label `instance` changes.
"""

import random

from ranklab.cluster.promql import STALE

SCRAPE, FLOPS, PEAK = 15, 4.2e10, 989e12


def keep(series, name, run, rank, values, node=0):
    """Add the values of a rank to `series`, one value for each scrape.

    A value of None means that there was no rank; "fails", a stale mark.
    """
    labels = frozenset({"__name__": name, "run": run, "rank": str(rank), "job": "train",
                        "instance": f"node{node + rank // 4}:{9400 + rank % 4}"}.items())
    points = [(SCRAPE * i, STALE if x == "fails" else float(x)) for i, x in enumerate(values)
              if x is not None]
    if points and points[-1][0] < SCRAPE * (len(values) - 1):  # it ends: the server marks that
        points.append((points[-1][0] + SCRAPE, STALE))
    series[labels] = series.get(labels, []) + points


def trained(*lives, ranks=4, run="a", step=8.0, fails=False, series=None, dies=None,
            moves=True):  # fmt: skip
    """Add the series of a run for mfu_alert_rule to `series`; return it.

    lives: for each start of its processes: (minute of the start, [(until minute, MFU), ...])
    step: seconds of a step at an MFU of 0.4
    moves: the second life is on different nodes
    dies: minute from which the last rank is no longer scraped
    """
    series = {} if series is None else series
    size = lives[-1][1][-1][0] * 60 // SCRAPE + 1
    for life, (start, parts) in enumerate(lives):
        work, counts = 0.0, [None] * int(start * 60 // SCRAPE)
        for i in range(len(counts), int(parts[-1][0] * 60 // SCRAPE) + 1):
            mfu = next(mfu for until, mfu in parts if i * SCRAPE <= until * 60)
            counts.append(int(work / (0.4 * step)) * 0.4 * step * PEAK / FLOPS)
            work += mfu * SCRAPE
        for rank in range(ranks):
            until = dies * 60 // SCRAPE if dies and rank == ranks - 1 else len(counts)
            tokens = counts[:until] + [None] * (size - until)
            for name, constant in (("tokens_total", None), ("flops_per_token", FLOPS),
                                   ("peak_flops", PEAK)):
                values = [None if x is None else "fails" if fails and i % 8 == 2 * rank + 1 else
                          constant or x for i, x in enumerate(tokens)]
                keep(series, f"train_{name}", run, rank, values, 2 * life * moves)
    return series


def stepped(*changes, ranks=8, run="a", step=1.0, size=161, series=None, fails=()):
    """Add the series of a run for straggler_rule to `series`; return it.

    A step takes `step` seconds, with 3% of noise.
    changes: (rank or None for all, from minute, until minute, factor; 0: the rank is gone)
    fails: ranks whose every 8th scrape fails
    """
    series, draw = {} if series is None else series, random.Random(0)
    for rank in range(ranks):
        values = [step * draw.gauss(1, 0.03) for _ in range(size)]
        for slow_rank, start, end, factor in changes:
            for i in range(round(start * 4), min(size, round(end * 4))):
                if slow_rank in (rank, None):
                    values[i] = values[i] * factor if factor and values[i] else None
        values = ["fails" if rank in fails and i % 8 == 3 else x for i, x in enumerate(values)]
        keep(series, "train_step_seconds", run, rank, values)
    return series
