"""The baseline that every later lab is compared with: a GPT on real text, on one device.

    python -m ranklab.projects.baseline                       laptop size, under half a minute
    python -m ranklab.projects.baseline --size 350m --device cuda --compile
    python -m ranklab.projects.baseline --size 1.5b --device cuda --compile --steps 200

On a GPU: bf16, fused AdamW, flash attention through SDPA, a vocabulary padded to a multiple of 128.
The micro-batches suit 80 GB; with less, or when memory runs out: --micro-batch 4, then --recompute,
then --loss-chunks 8; PYTORCH_ALLOC_CONF=expandable_segments:True reduces fragmentation.
"""

import sys

import torch

from ranklab.projects.baseline.training import Options, report_with_sample, run
from ranklab.projects.runner import Project


def act(options, settings):
    options = dict(vars(options))
    torch.set_num_threads(options.pop("threads"))  # a second one slows small matrices down
    if settings.precision != "fp32":
        torch.set_float32_matmul_precision("high")  # TF32, where autocast leaves float32 on a GPU
    return report_with_sample(run(**options, **vars(settings)))


project = Project(__package__, __doc__, Options, act)

if __name__ == "__main__":
    sys.exit(project.main())
