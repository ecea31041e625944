"""A CNN on real images: the same accuracy on 1, 2 and 4 ranks, and what each piece is good for.

    python -m ranklab.projects.data_parallel                   digits on 1, 2 and 4 ranks
    python -m ranklab.projects.data_parallel --learning-rate   four times the batch: and lr?
    python -m ranklab.projects.data_parallel --pieces          one piece left out at a time
    python -m ranklab.projects.data_parallel --data cifar10 --folder DIR --ranks 8
    torchrun --nproc-per-node 8 -m ranklab.projects.data_parallel --data mnist --folder DIR

Under torchrun or srun it trains on the ranks that are there. Nothing is downloaded: DIR is where
MNIST's four idx files, or CIFAR-10's batches, are.
"""

import sys

from ranklab.data import find_images
from ranklab.engine.in_place import is_started_by_another
from ranklab.options import positive
from ranklab.projects.command import Command, refusals, save_figure, say
from ranklab.projects.data_parallel import (
    learning_rate_table, learning_rates, pieces, pieces_table, scale, scale_table,
)
from ranklab.projects.data_parallel.config import TRAINING, Settings
from ranklab.projects.data_parallel.training import run

LONGEST = 24 * 3600  # seconds of a whole training run


def parse(argv, in_job):
    """(the options, the Settings)."""
    command = Command(__package__, __doc__)
    command.add_fields(Settings)
    command.add_ranks("at most this many; without torchrun or srun")
    command.add_argument("--seeds", type=positive, default=3, help="how many runs of each kind")
    command.add_argument("--learning-rate", action="store_true",
                         help="scaled or not, warmed or not")
    command.add_argument("--pieces", action="store_true", help="leave out one piece at a time")
    command.add_figure()
    options = command.parse(argv)
    if in_job and (options.ranks or options.learning_rate):
        command.error("--ranks and --learning-rate choose numbers of ranks: run them with python, "
                      "not under torchrun or srun")
    if options.pieces and options.learning_rate:
        command.error("--pieces and --learning-rate are two studies: name one")
    settings = command.config(TRAINING[options.data or "digits"], options)
    if settings.data != "digits" and not settings.folder:
        command.error(f"--data {settings.data} needs --folder: where its files are")
    if settings.folder and not in_job:  # what is wrong with them is said before any rank reads them
        find_images(settings.data, settings.folder)
    return options, settings


@refusals(__package__)
def main(argv=None):
    in_job = is_started_by_another()
    options, settings = parse(argv, in_job)
    # in a job the limit is that of one collective; alone it is that of the whole run
    how = {"seeds": range(options.seeds), "progress": settings.data != "digits",
           "timeout": 600 if in_job else LONGEST}
    R = None if in_job else options.ranks or 4
    if options.pieces:
        table, found = pieces_table, pieces(settings, R, **how)
    elif options.learning_rate:
        table, found = learning_rate_table, learning_rates(settings, R, **how)
    elif in_job:
        runs = run(settings, **how)
        table, found = scale_table, {runs[0].ranks: runs}
    else:
        up_to = [2**k for k in range(R.bit_length()) if 2**k < R] + [R]
        table, found = scale_table, scale(settings, up_to, **how)
    say(table(found))
    save_figure(options.figure, lambda: draw(found, options.pieces))
    return 0


def draw(found, has_pieces):
    from ranklab.plots import data_parallel as plots  # here: the only line that needs matplotlib

    seen = {name: [one.accuracy for one in runs] for name, runs in found.items()}
    if not has_pieces:
        return plots.accuracy_ranges(seen)
    return plots.pieces(seen, {name: [one.worst for one in runs] for name, runs in found.items()})


if __name__ == "__main__":
    sys.exit(main())
