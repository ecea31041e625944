"""Training runs side by side: other numbers of ranks, or other configs."""

import statistics

from ranklab.data import find_images
from ranklab.engine.in_place import is_started_by_another
from ranklab.projects.authors import authors_of
from ranklab.projects.command import ranks_to_come, time_limit
from ranklab.projects.data_parallel.config import Config
from ranklab.projects.data_parallel.training import Functions, refuse_ranks, run
from ranklab.projects.runner import Shown


def scale(config=Config(), ranks=(1, 2, 4), seeds=(0, 1, 2), **how):
    """{number of ranks: [Run for each seed]}, always with the same global batch.

    how  for run: progress, timeout, a learner's own replica, sampler, scale, agree
    """
    for R in ranks:  # before the first of them is run
        refuse_ranks(config, R)
    return {R: run({R: config}, R, seeds, **how)[R] for R in ranks}


def best_seconds(runs):
    """The shortest epoch of all: what else the machine does can only add."""
    return min(second for one in runs for second in one.seconds)


def ranges_overlap(found):
    """True when the ranges over seeds have a value in common, for all that was run."""
    seen = [[one.accuracy for one in runs] for runs in found.values()]
    return max(map(min, seen)) <= min(map(max, seen))


def table(found):
    """What `run` or `scale` found, as text: a row for each name or number of ranks."""
    first = next(iter(found.values()))
    lines = [f"{'':21} {'held-out accuracy':>19} {'worst':>6} {'differ by':>9} {'agree':>7} "
             f"{'loss':>5} {'s/epoch':>8} {'speed-up':>8}"]
    for name, runs in found.items():
        name = f"{name} rank" + "s" * (name > 1) if isinstance(name, int) else name
        right, agree = [one.accuracy for one in runs], sum((one.agree for one in runs), [])
        worst, seconds = min(one.worst for one in runs), best_seconds(runs)
        lines.append(f"{name:21} {statistics.mean(right):.3f} ({min(right):.3f}-{max(right):.3f}) "
                     f"{worst:6.3f} {max(one.spread for one in runs):9.2g} "
                     f"{f'{sum(agree)} of {len(agree)}':>7} "
                     f"{statistics.mean(one.loss[-1] for one in runs):5.3f} "
                     f"{seconds:8.3f} {best_seconds(first) / seconds:8.2f}")
    if len(found) > 1 and len(first) > 1:
        lines.append(f"The ranges over {len(first)} seeds "
                     f"{'overlap' if ranges_overlap(found) else 'DO NOT OVERLAP'}.")
    return "\n".join([*lines, authors_of(first[0].own, Functions._fields)])


def study(options, config):
    """What the command shows: `scale` up to --ranks, or on the ranks of the job."""
    in_job, last = is_started_by_another(), options.ranks or 4
    if config.data != "digits" and not config.folder:
        raise ValueError(f"--data {config.data} needs --folder: where its files are")
    if config.folder and not in_job:  # what is wrong with them is said before any rank reads them
        find_images(config.data, config.folder)
    ranks = [2**k for k in range(last.bit_length()) if 2**k < last] + [last]
    found = scale(config, [ranks_to_come()] if in_job else ranks, range(options.seeds),
                  progress=config.data != "digits", timeout=time_limit())
    return Shown(table(found), lambda: figure(found))


def figure(found):
    from ranklab.plots.data_parallel import held_out_errors  # here: what needs matplotlib

    return held_out_errors(found)
