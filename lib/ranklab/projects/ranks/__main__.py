"""The first thing to run on a new cluster: is every rank there, correct, and as fast as the others?

    python -m ranklab.projects.ranks --ranks 4
    torchrun --nproc-per-node 8 -m ranklab.projects.ranks
    srun -N 4 --ntasks-per-node 8 python -m ranklab.projects.ranks

Rank 0 prints where each rank runs, whether an all-reduce is correct and how long it takes by size,
and the ranks that compute slowly or are missing. The exit code is 1 if anything is wrong.
"""

import sys

from ranklab.projects.ranks.inspection import Options, report, run
from ranklab.projects.runner import Project, Shown


def act(options, _):
    results = run(**vars(options))
    return Shown(report(results), code=1 if results["problems"] else 0)


project = Project(__package__, __doc__, Options, act)

if __name__ == "__main__":
    sys.exit(project.main())
