"""A real Slurm on hosts of its own, inside this machine: a job loses a node and goes on as if
nothing had happened. Then links between hosts: slow ones, one that is cut, one that flaps.

    python -m ranklab.projects.cluster
    python -m ranklab.projects.cluster --only links

Needs root, for network namespaces, and Slurm: apt install slurm-wlm munge, and for accounting
slurmdbd mariadb-server. At full size it is the same file: sbatch labs/jobs/cluster.sbatch.
"""

import sys

from ranklab.projects.cluster.config import Options
from ranklab.projects.cluster.report import act
from ranklab.projects.runner import Project

project = Project(__package__, __doc__, Options, act)
main = project.main

if __name__ == "__main__":
    sys.exit(main())
