"""A GPT trained over data, tensor and pipeline ranks; what it costs, beside the formulas.

    python -m ranklab.projects.hybrid --layout 2x2x2,zero,sp
    torchrun --nproc-per-node=8 -m ranklab.projects.hybrid --dp 2 --tp 2 --pp 2
    python -m ranklab.projects.hybrid --layout 1x2x4 --resume --checkpoint build/hybrid
    python -m ranklab.projects.hybrid --size 130b --dry-run

A checkpoint goes on in any other layout. `ranklab compare` puts layouts side by side.
"""

import dataclasses
import sys

from ranklab.hybrid import parse_layout
from ranklab.options import positive
from ranklab.projects.command import Command, refusals, say, time_limit
from ranklab.projects.hybrid.config import (
    SIZES, Settings, refuse_what_does_not_fit, usual,
)
from ranklab.projects.hybrid.report import report
from ranklab.projects.hybrid.training import run


def parse(argv=None):
    """(the options, with a Layout; the Settings)."""
    command = Command(__package__, __doc__)
    command.add_argument("--size", choices=["laptop", *SIZES], default="laptop",
                         help="of the GPT, with its layout")
    command.add_argument("--layout", help="dp x tp x pp and more: 2x2x2,zero,sp,virtual=2")
    for axis in ("dp", "tp", "pp"):
        command.add_argument(f"--{axis}", type=positive, help="ranks along this axis")
    command.add_data()
    command.add_argument("--dry-run", action="store_true", help="one process poses as rank 0")
    command.add_resume()
    command.add_fields(Settings, without=["betas"])
    options = command.parse(argv)
    shape, settings, layout = usual(options.size)
    settings = command.config(settings, options)
    sizes = {axis: n for axis in ("dp", "tp", "pp") if (n := getattr(options, axis)) is not None}
    with refusals(command.prog):
        if options.layout or sizes:
            layout = dataclasses.replace(parse_layout(options.layout or "1x1x1"), **sizes)
        refuse_what_does_not_fit(shape, settings, layout)
    options.layout = layout
    return options, settings


@refusals(__package__)
def main(argv=None):
    options, settings = parse(argv)
    if options.dry_run:
        from ranklab.projects.hybrid.dry_run import dry_run_report  # here: it fakes a GPU

        say(dry_run_report(options.size, settings.job(usual(options.size)[0]), options.layout))
    else:
        say(report(run(options.size, options.layout, resume=options.resume, path=options.data,
                       progress=sys.stderr.isatty(), timeout=time_limit(), **vars(settings))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
