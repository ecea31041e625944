"""A CNN on real images: the same accuracy on 1, 2 and 4 ranks, and what each piece is for.

    python -m ranklab.projects.data_parallel                   digits on 1, 2 and 4 ranks
    python -m ranklab.projects.data_parallel --without mean    one piece left out
    python -m ranklab.projects.data_parallel --data cifar10 --folder DIR --ranks 8
    torchrun --nproc-per-node 8 -m ranklab.projects.data_parallel --data mnist --folder DIR

Under torchrun or srun it trains on the job's ranks. Nothing is downloaded: DIR holds
MNIST's four idx files, or CIFAR-10's batches.
"""

import sys

from ranklab.projects.data_parallel.comparison import Options, study
from ranklab.projects.runner import Project

project = Project(__package__, __doc__, Options, study)

if __name__ == "__main__":
    sys.exit(project.main())
