"""Compare the planner with published runs, and fit its constants; plan six orders; measure
this machine.

    python -m ranklab.projects.planner score
    python -m ranklab.projects.planner score FILE.csv ... --json
    python -m ranklab.projects.planner score --part validation
    python -m ranklab.projects.planner fit
    python -m ranklab.projects.planner orders
    torchrun --nproc-per-node 8 -m ranklab.projects.planner measure --write node.json

A file of runs has the header of lib/ranklab/planner/published/runs_*.csv. The constants were fitted
on three quarters of these rows, chosen by a hash of row_id; the rest is for validation.
"""

import sys

from ranklab.projects.planner.report import Options, act
from ranklab.projects.runner import Project

project = Project(__package__, __doc__, Options, act)

if __name__ == "__main__":
    sys.exit(project.main())
