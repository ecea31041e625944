"""A GPT on sequences of which a rank can hold an eighth, compared with one on short windows.

    python -m ranklab.projects.context_parallel --method both
    torchrun --nproc-per-node 8 -m ranklab.projects.context_parallel --size gpt2 \\
        --checkpoint build/context

A checkpoint can be resumed with any number of ranks and by any method.
"""

import sys

from ranklab.projects.context_parallel.training import Options, figure, report, run
from ranklab.projects.runner import Project, run_and_report

project = Project(__package__, __doc__, Options, run_and_report(run, report, figure))

if __name__ == "__main__":
    sys.exit(project.main())
