"""A CNN on real images: the same accuracy on 1, 2 and 4 ranks, and what each piece is good for.

    python -m ranklab.projects.data_parallel                   digits on 1, 2 and 4 ranks
    python -m ranklab.projects.data_parallel --learning-rate   four times the batch: and lr?
    python -m ranklab.projects.data_parallel --pieces          one piece left out at a time
    python -m ranklab.projects.data_parallel --data cifar10 --folder DIR --ranks 8
    torchrun --nproc-per-node 8 -m ranklab.projects.data_parallel --data mnist --folder DIR

Under torchrun or srun it trains on the ranks that are there. Nothing is downloaded: DIR is where
MNIST's four idx files, or CIFAR-10's batches, are.
"""

import argparse
import dataclasses
import statistics
import sys

from ranklab.engine import is_main_process
from ranklab.engine.in_place import is_started_by_another
from ranklab.projects.data_parallel_training import PIECES, TRAINING, Settings, run, run_all

# What a run needs to be right, whatever the learning rate; see learning_rates for the rest.
RIGHT = tuple(name for name in PIECES if name not in ("scaling", "warmup"))
LONGEST = 24 * 3600  # seconds of a whole training run


def scale(settings=Settings(), ranks=(1, 2, 4), seeds=(0, 1, 2), **how):
    """{number of ranks: [Run for each seed]}, always with the same global batch."""
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


def settings_of(options):
    """The Settings that the command line asks for."""
    known = {field.name for field in dataclasses.fields(Settings)}
    given = {k: v for k, v in options.items() if k in known and v is not None}
    if "without" in given:
        given["without"] = tuple(given["without"].split(","))
    if options["data"] != "digits" and not options["folder"]:
        raise ValueError(f"--data {options['data']} needs --folder: where its files are")
    if given.get("norm") == "none":
        given["norm"] = None
    return dataclasses.replace(TRAINING[options["data"]], **given)


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=TRAINING, default="digits")
    parser.add_argument("--folder", help="where the files of mnist or cifar10 are")
    parser.add_argument("--ranks", type=int, help="at most this many; without torchrun or srun")
    parser.add_argument("--seeds", type=int, default=3, help="how many runs of each kind")
    parser.add_argument("--learning-rate", action="store_true", help="scaled or not, warmed or not")
    parser.add_argument("--pieces", action="store_true", help="leave out one piece at a time")
    parser.add_argument("--without", help=f"with commas, of: {', '.join(PIECES)}")
    parser.add_argument("--engine", choices=("ours", "torch"))
    parser.add_argument("--precision", choices=("fp32", "bf16"))
    parser.add_argument("--norm", choices=("batch", "sync", "group", "none"))
    for name in ("epochs", "batch", "base-batch", "warmup", "width"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("lr", "momentum", "weight-decay"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--figure", help="draw what was found in this .svg or .png")
    return parser


def main(argv=None):
    parser = arguments()
    options = vars(parser.parse_args(argv))
    in_job = is_started_by_another()
    if in_job and (options["ranks"] or options["learning_rate"]):
        parser.error("--ranks and --learning-rate choose numbers of ranks: run them with python, "
                     "not under torchrun or srun")  # fmt: skip
    try:
        settings = settings_of(options)
    except ValueError as error:
        parser.error(str(error))
    # in a job the limit is that of one collective; alone it is that of the whole run
    how = {"seeds": range(options["seeds"]), "progress": settings.data != "digits",
           "timeout": 600 if in_job else LONGEST}  # fmt: skip
    R = None if in_job else options["ranks"] or 4
    if options["pieces"]:
        table, found = pieces_table, pieces(settings, R, **how)
    elif options["learning_rate"]:
        table, found = learning_rate_table, learning_rates(settings, R, **how)
    elif in_job:
        runs = run(settings, **how)
        table, found = scale_table, {runs[0].ranks: runs}
    else:
        up_to = [2**k for k in range(R.bit_length()) if 2**k < R] + [R]
        table, found = scale_table, scale(settings, up_to, **how)
    if is_main_process():
        print(table(found))
        if options["figure"]:
            draw(found, options["figure"], options["pieces"])
    return 0


def draw(found, path, has_pieces=False):
    from ranklab.plots import data_parallel as plots  # here: the only lines that need matplotlib
    from ranklab.plots.style import save

    seen = {name: [one.accuracy for one in runs] for name, runs in found.items()}
    if has_pieces:
        worst = {name: [one.worst for one in runs] for name, runs in found.items()}
        save(plots.pieces(seen, worst), path)
    else:
        save(plots.accuracy_ranges(seen), path)


if __name__ == "__main__":
    sys.exit(main())
