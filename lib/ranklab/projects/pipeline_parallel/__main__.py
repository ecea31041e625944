"""A GPT trained through a pipeline; and how busy each stage is, beside the formula.

    python -m ranklab.projects.pipeline_parallel --schedule interleaved --virtual 2
    python -m ranklab.projects.pipeline_parallel --slow-stage 2        the monitor finds it
    torchrun --nproc-per-node 4 -m ranklab.projects.pipeline_parallel --size gpt2-xl \\
        --checkpoint build/pipeline

A checkpoint goes on with any number of stages and with any schedule.
"""

import sys

from ranklab.projects.command import Command, say, time_limit
from ranklab.projects.pipeline_parallel.config import SCHEDULES, SIZES, Settings, schedule_of
from ranklab.projects.pipeline_parallel.report import report
from ranklab.projects.pipeline_parallel.training import run


def parse(argv=None):
    """(the options, the Settings)."""
    command = Command(__package__, __doc__)
    command.add_argument("--size", choices=SIZES, default="laptop")
    command.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    command.add_argument("--virtual", type=int, help="interleaved: stages of a rank (2)")
    command.add_ranks()
    command.add_resume()
    command.add_fields(Settings, without=["betas", "micro_batch"])
    options = command.parse(argv)
    command.refuse_ranks_in_a_job(options)
    try:
        options.schedule = schedule_of(options.schedule, options.virtual)
    except ValueError as error:
        command.error(str(error))
    return options, command.config(SIZES[options.size][1], options)


if __name__ == "__main__":
    options, settings = parse()
    say(report(run(options.size, options.ranks, options.schedule,
                   resume=options.resume, progress=sys.stderr.isatty(), timeout=time_limit(),
                   **vars(settings))))
