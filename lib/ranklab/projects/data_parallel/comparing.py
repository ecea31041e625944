"""Training runs side by side: numbers of ranks, learning rates, pieces left out."""

import statistics
from dataclasses import replace

from ranklab.data import find_images
from ranklab.engine.in_place import is_started_by_another
from ranklab.projects.authors import authors_of
from ranklab.projects.command import ranks_to_come, time_limit
from ranklab.projects.data_parallel.config import PIECES, Config
from ranklab.projects.data_parallel.training import Functions, refuse_ranks, run

# What a run needs to be right, whatever the learning rate; see learning_rates for the rest.
RIGHT = tuple(name for name in PIECES if name not in ("scaling", "warmup"))


def scale(config=Config(), ranks=(1, 2, 4), seeds=(0, 1, 2), **how):
    """{number of ranks: [Run for each seed]}, always with the same global batch.

    how  for run: progress, timeout, a learner's own replica, sampler, scale, agree
    """
    for R in ranks:  # before the first of them is run
        refuse_ranks(config, R)
    return {R: run({R: config}, R, seeds, **how)[R] for R in ranks}


def learning_rates(config=Config(), ranks=4, seeds=(0, 1, 2), whole=None, **how):
    """{what was done about the learning rate: [Run for each seed]}, for the same epochs.

    First the small batch, on as many ranks as leave each its images; then the large one.
    whole  what `scale` found for these ranks and seeds: the last row, which is not run again
    """
    small, large, lr = config.base_batch, config.batch, config.lr
    few = max(1, ranks * small // large)
    base = {f"batch {small}, lr {lr:g}": replace(config, batch=small, warmup=0)}
    left_out = {f"batch {large}, lr {lr:g}": ("scaling",),
                f"batch {large}, lr {lr * large / small:g}": ("warmup",),
                f"batch {large}, lr {lr * large / small:g}, warm-up": ()}  # fmt: skip
    return run(base, few, seeds, **how) | _without(left_out, config, ranks, seeds, whole, how)


def pieces(config=Config(), ranks=4, seeds=(0, 1, 2), names=RIGHT, whole=None, **how):
    """{piece that was left out: [Run for each seed]}; first of all "nothing".

    whole  what `scale` found for these ranks and seeds: that first row, which is not run again
    """
    left_out = {"nothing": (), **{name: (name,) for name in names}}
    return _without(left_out, config, ranks, seeds, whole, how)


def _without(left_out, config, ranks, seeds, whole, how):
    """{name: [Run for each seed]}, where `left_out` is {name: pieces}; all in one launch."""
    configs = {name: replace(config, without=config.without + out)
               for name, out in left_out.items() if out or not whole}  # fmt: skip
    runs = run(configs, ranks, seeds, **how)
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


def study(options, config):
    """(function that makes a table, what it makes it of): what the command asks for was run."""
    in_job = is_started_by_another()
    if config.data != "digits" and not config.folder:
        raise ValueError(f"--data {config.data} needs --folder: where its files are")
    if config.folder and not in_job:  # what is wrong with them is said before any rank reads them
        find_images(config.data, config.folder)
    how = {"seeds": range(options.seeds), "progress": config.data != "digits",
           "timeout": time_limit()}
    R = None if in_job else options.ranks or 4
    if options.pieces:
        return pieces_table, pieces(config, R, **how)
    if options.learning_rate:
        return learning_rate_table, learning_rates(config, R, **how)
    if in_job:
        return scale_table, run({ranks_to_come(): config}, **how)
    up_to = [2**k for k in range(R.bit_length()) if 2**k < R] + [R]
    return scale_table, scale(config, up_to, **how)


def figure(found, has_pieces=False):
    from ranklab.plots import data_parallel as plots  # here: the only line that needs matplotlib

    seen = {name: [one.accuracy for one in runs] for name, runs in found.items()}
    if not has_pieces:
        return plots.accuracy_ranges(seen)
    return plots.pieces(seen, {name: [one.worst for one in runs] for name, runs in found.items()})
