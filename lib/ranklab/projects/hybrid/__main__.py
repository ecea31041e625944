"""Train a GPT over data, tensor and pipeline ranks, and compare its costs with the formulas.

    python -m ranklab.projects.hybrid --layout 2x2x2,zero,sp
    torchrun --nproc-per-node=8 -m ranklab.projects.hybrid
    python -m ranklab.projects.hybrid --layout 1x2x4 --resume --checkpoint build/hybrid
    python -m ranklab.projects.hybrid --size 130b --dry-run

A checkpoint can be resumed in any other layout. `ranklab compare` puts layouts side by side.
"""

import sys

from ranklab.projects.hybrid.config import Options
from ranklab.projects.hybrid.training import dry_run_report, report, run
from ranklab.projects.runner import Project, watched


def act(options, config):
    shape, layout = options.chosen_shape(), options.chosen_layout()
    if options.dry_run:
        return dry_run_report(options.size, config.job(shape), layout)
    return report(run(options.size, layout, resume=options.resume, path=options.path, shape=shape,
                      export=options.export, **watched(), **vars(config)))


project = Project(__package__, __doc__, Options, act)

if __name__ == "__main__":
    sys.exit(project.main())
