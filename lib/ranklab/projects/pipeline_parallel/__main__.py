"""A GPT trained through a pipeline; and how busy each stage is, beside the formula.

    python -m ranklab.projects.pipeline_parallel --schedule interleaved --virtual 2
    python -m ranklab.projects.pipeline_parallel --slow-stage 2        the monitor finds it
    torchrun --nproc-per-node 4 -m ranklab.projects.pipeline_parallel --size gpt2-xl \\
        --checkpoint build/pipeline

A checkpoint goes on with any number of stages and with any schedule.
"""

import sys

from ranklab.projects.pipeline_parallel.config import Options, schedule_of
from ranklab.projects.pipeline_parallel.report import report
from ranklab.projects.pipeline_parallel.training import run
from ranklab.projects.runner import Project, watched


def act(options, settings):
    schedule = schedule_of(options.schedule, options.virtual)
    return report(run(options.size, options.ranks, schedule, path=options.path,
                      resume=options.resume, **watched(), **vars(settings)))


project = Project(__package__, __doc__, Options, act)
main = project.main

if __name__ == "__main__":
    sys.exit(main())
