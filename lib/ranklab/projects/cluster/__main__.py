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
from dataclasses import dataclass

from ranklab.basics.options import option
from ranklab.projects import runner
from ranklab.projects.cluster.links import try_links
from ranklab.projects.cluster.node_loss import try_node_loss
from ranklab.projects.runner import Project, Shown

PARTS = {"job": try_node_loss, "links": try_links}


@dataclass(frozen=True)
class Options(runner.Options):
    """The command's options."""

    only: str | None = option(None, "one part", choices=(None, *PARTS))


def act(options, _):
    say = functools.partial(print, flush=True)
    successes = [PARTS[name](say) for name in ([options.only] if options.only else PARTS)]
    return Shown("", code=int(not all(successes)))


project = Project(__package__, __doc__, Options, act)

if __name__ == "__main__":
    sys.exit(project.main())
