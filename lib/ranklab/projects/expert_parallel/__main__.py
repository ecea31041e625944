"""A GPT with experts, spread over ranks, beside a dense GPT that costs a token as much.

    python -m ranklab.projects.expert_parallel --balance bias
    torchrun --nproc-per-node 8 -m ranklab.projects.expert_parallel --size gpt2 --ep 8 \\
        --checkpoint build/experts

A checkpoint goes on with any number of ranks and any ep.
"""

import sys
from functools import partial

from ranklab.projects.command import ranks_to_come
from ranklab.projects.expert_parallel.config import RANKS, Options
from ranklab.projects.expert_parallel.report import report
from ranklab.projects.expert_parallel.training import run
from ranklab.projects.runner import Project, Shown, watched


def draw(found):
    from ranklab.plots.expert_parallel import loads  # here: only a figure needs matplotlib

    return loads({"": found.loads})


def act(options, settings):
    ranks = options.ranks or ranks_to_come(RANKS)
    found = run(options.size, ranks, path=options.path, resume=options.resume, **watched(),
                **vars(settings))
    return Shown(report(found), partial(draw, found))


project = Project(__package__, __doc__, Options, act)
main = project.main

if __name__ == "__main__":
    sys.exit(main())
