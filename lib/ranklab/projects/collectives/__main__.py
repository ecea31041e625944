"""How fast are the collectives here? nccl-tests' columns, for our algorithms and the backend's.

    python -m ranklab.projects.collectives --ranks 4
    torchrun --nproc-per-node 8 -m ranklab.projects.collectives --max 1G
    mpirun -n 4 python -m ranklab.projects.collectives --mpi

time is the slowest rank's median; algbw = size / time; busbw = algbw * the load of the busiest
link (2(R-1)/R for all-reduce), which is what to compare with the hardware's bandwidth. As in
nccl-tests, size is the whole tensor: the input of reduce-scatter, the output of all-gather.
"""

import sys

from ranklab.peers import mpi
from ranklab.projects.collectives.config import Config
from ranklab.projects.collectives.timing import by_mpi, figure, run, summary, table
from ranklab.projects.runner import Project, Shown


def act(config, _):
    sizes, iters = config.all_sizes(), config.iters
    if config.mpi and not mpi.is_here():
        return mpi.NO_MPI
    rows = by_mpi(sizes, iters) if config.mpi else run(
        config.ranks, config.nodes, config.verbs, sizes, config.kind, iters)
    return Shown("\n".join([table(rows), summary(rows)]).strip(), lambda: figure(rows),
                 int(any(row.wrong for row in rows)))


project = Project(__package__, __doc__, Config, act)
main = project.main

if __name__ == "__main__":
    sys.exit(main())
