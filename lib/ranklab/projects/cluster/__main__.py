"""A real Slurm on hosts of its own, inside this machine: a job loses a node and goes on as if
nothing had happened. Then links between hosts are slow, flap, and are cut.

    python -m ranklab.projects.cluster
    python -m ranklab.projects.cluster --only links

Needs root, for network namespaces, and Slurm: apt install slurm-wlm munge; for accounting slurmdbd
mariadb-server, for the dashboard and its alert prometheus prometheus-alertmanager. At full size
use the same file: sbatch labs/jobs/cluster.sbatch.
"""

import functools
import sys

from ranklab.projects.cluster.config import Options
from ranklab.projects.cluster.links import try_links
from ranklab.projects.cluster.node_loss import try_node_loss
from ranklab.projects.runner import Project, Shown


def act(options, _):
    parts = {"job": try_node_loss, "links": try_links}
    chosen = [options.only] if options.only else parts
    good = [parts[name](functools.partial(print, flush=True)) for name in chosen]
    return Shown("", code=int(not all(good)))


project = Project(__package__, __doc__, Options, act)
main = project.main

if __name__ == "__main__":
    sys.exit(main())
