"""A GPT with experts, spread over ranks, compared with a dense GPT of equal FLOPs per token.

    python -m ranklab.projects.expert_parallel --balance bias
    torchrun --nproc-per-node 8 -m ranklab.projects.expert_parallel --size gpt2 --ep 8 \\
        --checkpoint build/experts

A checkpoint can be resumed with any number of ranks and any ep.
"""

import sys

from ranklab.projects.expert_parallel.training import Options, figure, report, run
from ranklab.projects.runner import Project, run_and_report

project = Project(__package__, __doc__, Options, run_and_report(run, report, figure))

if __name__ == "__main__":
    sys.exit(project.main())
