"""A round through the clinic: all programs run under observation and are diagnosed.

    python -m ranklab.projects.clinic
    python -m ranklab.projects.clinic --case half_digits --form found

For your own program: ranklab diagnose --ranks 4 train.py. At full size, under torchrun on
each node: RANKLAB_DIAGNOSE=FOLDER torchrun ... -m ranklab.clinic.hooks train.py.
"""

import sys
from dataclasses import dataclass

from ranklab.basics.options import option
from ranklab.clinic.all_cases import CASES
from ranklab.projects import runner
from ranklab.projects.clinic.ward import FORMS, report, round_of
from ranklab.projects.runner import Project, Shown


@dataclass(frozen=True)
class Options(runner.Options):
    """The command's options."""

    case: str | None = option(None, "one program", choices=(None, *(each.name for each in CASES)))
    form: str | None = option(None, "one form", choices=(None, *FORMS))


def act(options, _):
    visits = round_of(options.form, options.case)
    return Shown(report(visits), code=int(sum(not v.is_right() for v in visits) > len(visits) // 8))


project = Project(__package__, __doc__, Options, act)

if __name__ == "__main__":
    sys.exit(project.main())
