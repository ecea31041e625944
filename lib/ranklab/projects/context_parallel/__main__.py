"""A GPT on sequences of which a rank can hold an eighth; beside one that sees short windows.

    python -m ranklab.projects.context_parallel --method both
    torchrun --nproc-per-node 8 -m ranklab.projects.context_parallel --size gpt2 \\
        --checkpoint build/context

A checkpoint goes on with any number of ranks and by any method.
"""

import sys
from functools import partial

from ranklab.projects.command import ranks_to_come
from ranklab.projects.context_parallel.config import SHARE, Options
from ranklab.projects.context_parallel.report import report
from ranklab.projects.context_parallel.training import run
from ranklab.projects.runner import Project, Shown, watched


def draw(found):
    from ranklab.plots.context_parallel import by_position  # here: only a figure needs matplotlib

    return by_position(found.by_position)


def act(options, settings):
    ranks = options.ranks or ranks_to_come(SHARE)
    found = run(options.size, ranks, path=options.path, resume=options.resume, **watched(),
                **vars(settings))
    return Shown(report(found), partial(draw, found))


project = Project(__package__, __doc__, Options, act)
main = project.main

if __name__ == "__main__":
    sys.exit(main())
