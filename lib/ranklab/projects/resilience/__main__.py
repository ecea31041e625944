"""Lab 12's training, in miniature, under a chaos monkey; it ends as if nothing had happened.

    python -m ranklab.projects.resilience --faults 5 --seed 1
    python -m ranklab.projects.resilience --soak 100

Ranks are killed, stopped, or leave a collective; checkpoints are damaged, disks fill up. The
signals and the files are real. At full size use the hybrid project: labs/jobs/resilience.sbatch.
"""

import sys

from ranklab.projects.command import time_limit
from ranklab.projects.resilience.report import announced, report
from ranklab.projects.resilience.soak import SHAPE, Options, soak
from ranklab.projects.runner import Project, Shown
from ranklab.trainer.text import text_for


def act(options, config):
    text, shape = text_for(SHAPE, config, options.path)
    seeds = range(options.monkey, options.monkey + options.soak)
    trials = [*announced(soak(shape, text, config, options.chosen_layouts(), seeds, options.faults,
                         timeout=time_limit()))]
    return Shown(report(trials), code=int(not all(each.is_good() for each in trials)))


project = Project(__package__, __doc__, Options, act)

if __name__ == "__main__":
    sys.exit(project.main())
