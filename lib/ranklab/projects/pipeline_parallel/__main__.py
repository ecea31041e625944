"""A GPT trained through a pipeline; how busy each stage is, compared with the formula.

    python -m ranklab.projects.pipeline_parallel --schedule interleaved --virtual 2
    python -m ranklab.projects.pipeline_parallel --slow-stage 2        the monitor finds it
    torchrun --nproc-per-node 4 -m ranklab.projects.pipeline_parallel --size gpt2-xl \\
        --checkpoint build/pipeline

A checkpoint can be resumed with any number of stages and with any schedule.
"""

import sys

from ranklab.projects.pipeline_parallel.training import Options, report, run, schedule_of
from ranklab.projects.runner import Project, watched


def act(options, settings):
    arguments = vars(options) | watched() | vars(settings)
    schedule = schedule_of(arguments.pop("schedule"), arguments.pop("virtual"))
    return report(run(schedule=schedule, **arguments))


project = Project(__package__, __doc__, Options, act)

if __name__ == "__main__":
    sys.exit(project.main())
