"""Training runs side by side: different numbers of ranks or configs, or a piece left out."""

import statistics
from dataclasses import dataclass

from ranklab.basics.options import check_options, existing_folder, option, positive
from ranklab.data import find_images
from ranklab.engine.in_place import is_started_by_another
from ranklab.meter.text import lined_up
from ranklab.projects.authors import authors_of
from ranklab.projects.command import ranks_to_come, time_limit
from ranklab.projects.data_parallel.training import Functions, refuse_ranks, run
from ranklab.projects.runner import Drawn, OnRanks, Shown

# The pieces that a run can leave out, and what goes wrong without each.
PIECES = {
    "broadcast": "every rank starts from its own weights",
    "average": "every rank steps along its own gradient, and keeps its own statistics",
    "mean": "gradients are summed, not averaged",
    "shard": "every rank takes rank 0's images",
    "epoch": "every epoch has the same order",
    "buffers": "every rank keeps its own batch-norm statistics",
}


@dataclass(frozen=True)
class Config:
    """The training settings, validated when created. The defaults suit the digits."""

    data: str = option("digits", "which images", ("digits", "mnist", "cifar10"))
    folder: str | None = option(None, "where the files of mnist or cifar10 are",
                                kind=existing_folder)
    epochs: int = option(3, "how often each image is seen", least=1)
    batch: int = option(64, "images in a step, over all ranks", least=1)
    lr: float = option(0.12, "right for --base-batch", least=0)
    base_batch: int = option(16, "images in a step for which --lr is meant", least=1)
    warmup: int = option(1, "epochs", least=0)
    momentum: float = option(0.0, "of SGD", least=0)
    weight_decay: float = option(0.0, "of SGD", least=0)
    width: int = option(8, "channels of the first layer", least=1)
    norm: str = option("batch", "sync: batch norm over all ranks",
                       ("batch", "sync", "group", "none"))
    precision: str = option("fp32", "bf16: by autocast", ("fp32", "bf16"))
    without: tuple[str, ...] = option((), f"with commas, of: {', '.join(PIECES)}")

    def __post_init__(self):
        check_options(self)
        if unknown := set(self.without) - set(PIECES):
            raise ValueError(f"without={min(unknown)!r}: the pieces are {', '.join(PIECES)}")


TRAINING = {
    "digits": Config(),
    "mnist": Config("mnist", epochs=5, batch=512, lr=0.05, base_batch=128, momentum=0.9, width=16),
    "cifar10": Config("cifar10", epochs=30, batch=512, lr=0.05, base_batch=128, warmup=5,
                      momentum=0.9, weight_decay=5e-4, width=64),
}


@dataclass(frozen=True)
class Options(OnRanks, Drawn):
    """The command's options besides Config's."""

    data: str = "digits"  # also of Config, which says more of it
    seeds: int = option(3, "how many runs of each kind", kind=positive)

    def settings(self):
        return TRAINING[self.data]


def scale(config=Config(), ranks=(1, 2, 4), seeds=(0, 1, 2), **options):
    """Return {number of ranks: [Run for each seed]}, always with the same global batch.

    options  of run: progress, timeout, a learner's own replica, sampler, scale, agree
    """
    for count in ranks:  # before the first of them is run
        refuse_ranks(config, count)
    return {count: run({count: config}, count, seeds, **options)[count] for count in ranks}


def best_seconds(runs):
    """Return the shortest epoch of all: other load on the machine only adds."""
    return min(second for run in runs for second in run.seconds)


def ranges_overlap(results):
    """Return whether the ranges of accuracy over seeds of all runs have a value in common."""
    ranges = [[run.accuracy for run in runs] for runs in results.values()]
    return max(map(min, ranges)) <= min(map(max, ranges))


def table(results):
    """Return the results of `run` or `scale` as text: a row for each name or number of ranks."""
    first, rows = next(iter(results.values())), []
    for name, runs in results.items():
        name = f"{name} rank" + "s" * (name > 1) if isinstance(name, int) else name
        right, agree = [run.accuracy for run in runs], sum((run.agree for run in runs), [])
        seconds = best_seconds(runs)
        rows.append((
            name, f"{statistics.mean(right):.3f} ({min(right):.3f}-{max(right):.3f})",
            f"{min(run.worst for run in runs):.3f}", f"{max(run.spread for run in runs):.2g}",
            f"{sum(agree)} of {len(agree)}", f"{statistics.mean(run.loss[-1] for run in runs):.3f}",
            f"{seconds:.3f}", f"{best_seconds(first) / seconds:.2f}"))
    lines = [lined_up(("", "held-out accuracy", "worst", "differ by", "agree", "loss", "s/epoch",
                       "speed-up"), rows)]
    if len(results) > 1 and len(first) > 1:
        lines.append(f"The ranges over {len(first)} seeds "
                     f"{'overlap' if ranges_overlap(results) else 'DO NOT OVERLAP'}.")
    return "\n".join([*lines, authors_of(first[0].own, Functions._fields)])


def study(options, config):
    """Show the results of `scale` up to --ranks, or on the ranks of the job."""
    in_job, last = is_started_by_another(), options.ranks or 4
    if config.data != "digits" and not config.folder:
        raise ValueError(f"--data {config.data} needs --folder: where its files are")
    if config.folder and not in_job:  # what is wrong with them is said before any rank reads them
        find_images(config.data, config.folder)
    ranks = [2**k for k in range(last.bit_length()) if 2**k < last] + [last]
    results = scale(config, [ranks_to_come()] if in_job else ranks, range(options.seeds),
                    progress=config.data != "digits", timeout=time_limit())
    return Shown(table(results), lambda: figure(results))


def figure(results):
    """Draw the errors on held-out images."""
    from ranklab.plots.data_parallel import held_out_errors  # here: needs matplotlib

    return held_out_errors(results)
