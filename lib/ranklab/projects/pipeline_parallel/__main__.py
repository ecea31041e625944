"""A GPT trained through a pipeline; and how busy each stage is, beside the formula.

    python -m ranklab.projects.pipeline_parallel --schedule interleaved --virtual 2
    python -m ranklab.projects.pipeline_parallel --slow-stage 2        the monitor finds it
    torchrun --nproc-per-node 4 -m ranklab.projects.pipeline_parallel --size gpt2-xl \\
        --checkpoint build/pipeline

A checkpoint goes on with any number of stages and with any schedule.
"""

import sys

from ranklab.options import positive
from ranklab.projects.command import Command, refusals, say, time_limit
from ranklab.projects.pipeline_parallel.config import SCHEDULES, SIZES, Settings, schedule_of
from ranklab.projects.pipeline_parallel.report import report
from ranklab.projects.pipeline_parallel.training import run


def parse(argv=None):
    """(the options, the Settings)."""
    command = Command(__package__, __doc__)
    command.add_argument("--size", choices=SIZES, default="laptop", help="of the GPT")
    command.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of micro-batches")
    command.add_argument("--virtual", type=positive, help="interleaved: stages of a rank (2)")
    command.add_ranks()
    command.add_resume()
    command.add_data()
    command.add_fields(Settings, without=["betas", "micro_batch"])
    options = command.parse(argv)
    with refusals(command.prog):
        options.schedule = schedule_of(options.schedule, options.virtual)
    return options, command.config(SIZES[options.size][1], options)


@refusals(__package__)
def main(argv=None):
    options, settings = parse(argv)
    say(report(run(options.size, options.ranks, options.schedule, path=options.data,
                   resume=options.resume, progress=sys.stderr.isatty(), timeout=time_limit(),
                   **vars(settings))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
