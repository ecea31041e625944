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

from ranklab.projects.data_parallel.comparing import figure, study
from ranklab.projects.data_parallel.config import Options
from ranklab.projects.runner import Project, Shown


def act(options, config):
    table, found = study(options, config)
    return Shown(table(found), lambda: figure(found, options.pieces))


project = Project(__package__, __doc__, Options, act)
main = project.main

if __name__ == "__main__":
    sys.exit(main())
