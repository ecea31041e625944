"""A GPT on real text, split over ranks: naively, by our tensor parallelism, and by DTensor.

    python -m ranklab.projects.tensor_parallel --ranks 4
    torchrun --nproc-per-node 4 -m ranklab.projects.tensor_parallel --size gpt2 --method tensor \\
        --checkpoint build/tp

--size gpt2-xl has 25 heads: 5 ranks. A checkpoint can be resumed with any number of ranks.
"""

import sys

from ranklab.projects.runner import Project, run_and_report
from ranklab.projects.tensor_parallel.training import Options, report, run

project = Project(__package__, __doc__, Options, run_and_report(run, report))

if __name__ == "__main__":
    sys.exit(project.main())
