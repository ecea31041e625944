"""How fast are the collectives here? nccl-tests' columns, for our algorithms and the backend's.

    python -m ranklab.projects.collectives --ranks 4
    torchrun --nproc-per-node 8 -m ranklab.projects.collectives --max 1G
    mpirun -n 4 python -m ranklab.projects.collectives --mpi

time is the slowest rank's median; algbw = size / time; busbw = algbw * the load of the busiest
link (2(R-1)/R for all-reduce), which is what to compare with the hardware's bandwidth. As in
nccl-tests, size is the whole tensor: the input of reduce-scatter, the output of all-gather.
"""

import sys

from ranklab.projects.collectives.timing import Options, benchmark
from ranklab.projects.runner import Project

project = Project(__package__, __doc__, Options, benchmark)

if __name__ == "__main__":
    sys.exit(project.main())
