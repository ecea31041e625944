"""Lab 12's training, in miniature, under a chaos monkey; it ends as if nothing had happened.

    python -m ranklab.projects.resilience --faults 5 --seed 1
    python -m ranklab.projects.resilience --soak 100

Ranks are killed, stopped, or leave a collective; checkpoints lose bytes, disks are full. The signals
and the files are real. A job at full size is the hybrid project's: labs/jobs/resilience.sbatch.
"""

import dataclasses
import sys

from ranklab.engine.in_place import is_started_by_another
from ranklab.hybrid import parse_layout
from ranklab.projects.resilience.config import SHAPE, Options
from ranklab.projects.resilience.report import report
from ranklab.projects.resilience.soak import soak
from ranklab.projects.runner import Project, Shown, watched
from ranklab.text_trainer import text_for


def act(options, config):
    if is_started_by_another():
        raise ValueError("this project starts ranks itself, and again when they die: run it by "
                         "python, not by torchrun or srun")
    config = dataclasses.replace(config, seed=0)  # --seed is the monkey's
    text, shape = text_for(SHAPE, config, options.path)
    seeds = range(options.seed, options.seed + options.soak)
    layouts = [*map(parse_layout, options.layouts.split())]
    trials = [*soak(shape, text, config, layouts, seeds, options.faults, **watched())]
    return Shown(report(trials, config), code=int(not all(each.is_good() for each in trials)))


project = Project(__package__, __doc__, Options, act)
main = project.main

if __name__ == "__main__":
    sys.exit(main())
