"""Training runs side by side: numbers of ranks, learning rates, pieces left out."""

import dataclasses
import statistics

from ranklab.data import find_images
from ranklab.engine.in_place import is_started_by_another
from ranklab.projects.authors import authors_of
from ranklab.projects.command import time_limit
from ranklab.projects.data_parallel.config import PIECES, Settings
from ranklab.projects.data_parallel.training import Functions, refuse_ranks, run, run_all

# What a run needs to be right, whatever the learning rate; see learning_rates for the rest.
RIGHT = tuple(name for name in PIECES if name not in ("scaling", "warmup"))


def scale(settings=Settings(), ranks=(1, 2, 4), seeds=(0, 1, 2), **how):
    """{number of ranks: [Run for each seed]}, always with the same global batch.

    how  for run_all: progress, timeout, a learner's own replica, sampler, scale, agree
    """
    for R in ranks:  # before the first of them is run
        refuse_ranks(settings, R)
    return {R: run(settings, R, seeds, **how) for R in ranks}


def learning_rates(settings=Settings(), ranks=4, seeds=(0, 1, 2), whole=None, **how):
    """{what was done about the learning rate: [Run for each seed]}, for the same epochs.

    First the small batch, on as many ranks as leave each its images; then the large one.
    whole  what `scale` found for these ranks and seeds: the last row, which is not run again
    """
    small, large = settings.base_batch, settings.batch
    few = max(1, ranks * small // large)
    base = dataclasses.replace(settings, batch=small, warmup=0)
    found = {f"batch {small}, lr {settings.lr:g}": run(base, few, seeds, **how)}
    lr = f"{settings.lr * large / small:g}"
    left_out = {f"batch {large}, lr {settings.lr:g}": ("scaling",),
                f"batch {large}, lr {lr}": ("warmup",),
                f"batch {large}, lr {lr}, warm-up": ()}  # fmt: skip
    return {**found, **_without(left_out, settings, ranks, seeds, whole, how)}


def pieces(settings=Settings(), ranks=4, seeds=(0, 1, 2), names=RIGHT, whole=None, **how):
    """{piece that was left out: [Run for each seed]}; first of all "nothing".

    whole  what `scale` found for these ranks and seeds: that first row, which is not run again
    """
    left_out = {"nothing": (), **{name: (name,) for name in names}}
    return _without(left_out, settings, ranks, seeds, whole, how)


def _without(left_out, settings, ranks, seeds, whole, how):
    """{name: [Run for each seed]}, where `left_out` is {name: pieces}; all in one launch."""
    many = {name: dataclasses.replace(settings, without=settings.without + out)
            for name, out in left_out.items() if out or not whole}  # fmt: skip
    runs = dict(zip(many, run_all(list(many.values()), ranks, seeds, **how)))
    return {name: runs.get(name, whole) for name in left_out}


def best_seconds(runs):
    """The shortest epoch of all: what else the machine does can only add."""
    return min(second for one in runs for second in one.seconds)


def accuracies(runs, worst=False):
    """ "0.944 (0.939-0.953)": mean and range over the seeds."""
    seen = [one.worst if worst else one.accuracy for one in runs]
    return f"{statistics.mean(seen):.3f} ({min(seen):.3f}-{max(seen):.3f})"


def agreement(runs):
    """ "12 of 12": in how many epochs all replicas ended with the same weights."""
    epochs = [agree for one in runs for agree in one.agree]
    return f"{sum(epochs)} of {len(epochs)}"


def ranges_overlap(found):
    """True when the ranges over seeds have a value in common, for all numbers of ranks."""
    seen = [[one.accuracy for one in runs] for runs in found.values()]
    return max(map(min, seen)) <= min(map(max, seen))


def scale_table(found):
    """What `scale` found, as text."""
    first = next(iter(found.values()))
    lines = [f"{'ranks':>5}  {'held-out accuracy':21}  {'epochs in agreement':>19}  "
             f"{'s/epoch':>8}  {'images/s':>9}  {'speed-up':>8}"]
    for R, runs in found.items():
        seconds = best_seconds(runs)
        lines.append(f"{R:5}  {accuracies(runs):21}  {agreement(runs):>19}  {seconds:8.3f}  "
                     f"{runs[0].images / seconds:9,.0f}  {best_seconds(first) / seconds:8.2f}")
    if len(found) > 1 and len(first) > 1:
        lines.append(f"The ranges over {len(first)} seeds "
                     f"{'overlap' if ranges_overlap(found) else 'DO NOT OVERLAP'}.")
    lines.append(authors_of(first[0].own, Functions._fields))
    return "\n".join(lines)


def learning_rate_table(found):
    """What `learning_rates` found, as text."""
    lines = [f"{'':29}  {'ranks':>5}  {'held-out accuracy':21}  loss in the last epoch"]
    lines += [f"{name:29}  {runs[0].ranks:5}  {accuracies(runs):21}  "
              f"{statistics.mean(one.loss[-1] for one in runs):.3f}"
              for name, runs in found.items()]  # fmt: skip
    return "\n".join(lines)


def pieces_table(found):
    """What `pieces` found, as text."""
    lines = [f"{'without':10}  {'held-out accuracy':21}  {'the worst replica':21}  "
             f"{'replicas differ by':>18}  then"]
    lines += [f"{name:10}  {accuracies(runs):21}  {accuracies(runs, worst=True):21}  "
              f"{max(one.spread for one in runs):18.3g}  {PIECES.get(name, '')}".rstrip()
              for name, runs in found.items()]  # fmt: skip
    return "\n".join(lines)


def study(options, settings):
    """(function that makes a table, what it makes it of): what the command asks for was run."""
    in_job = is_started_by_another()
    if settings.data != "digits" and not settings.folder:
        raise ValueError(f"--data {settings.data} needs --folder: where its files are")
    if settings.folder and not in_job:  # what is wrong with them is said before any rank reads them
        find_images(settings.data, settings.folder)
    how = {"seeds": range(options.seeds), "progress": settings.data != "digits",
           "timeout": time_limit()}
    R = None if in_job else options.ranks or 4
    if options.pieces:
        return pieces_table, pieces(settings, R, **how)
    if options.learning_rate:
        return learning_rate_table, learning_rates(settings, R, **how)
    if in_job:
        runs = run(settings, **how)
        return scale_table, {runs[0].ranks: runs}
    up_to = [2**k for k in range(R.bit_length()) if 2**k < R] + [R]
    return scale_table, scale(settings, up_to, **how)


def figure(found, has_pieces=False):
    from ranklab.plots import data_parallel as plots  # here: the only line that needs matplotlib

    seen = {name: [one.accuracy for one in runs] for name, runs in found.items()}
    if not has_pieces:
        return plots.accuracy_ranges(seen)
    return plots.pieces(seen, {name: [one.worst for one in runs] for name, runs in found.items()})
