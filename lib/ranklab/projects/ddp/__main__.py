"""ResNet-50 with torch's DDP, from a laptop to several nodes: the same command, more of it.

    python -m ranklab.projects.ddp --ranks 2                  laptop size, under a minute
    python -m ranklab.projects.ddp --ranks 4 --scaling        what more ranks bring
    torchrun --nproc-per-node 8 -m ranklab.projects.ddp --size full --data imagenet --compile \\
        --checkpoint run
    srun -N 4 --ntasks-per-node 8 python -m ranklab.projects.ddp --size full --data imagenet

A folder is read as ImageNet is laid out: train/<class>/*.JPEG and val/<class>/*.JPEG. After a
SIGTERM to torchrun or srun the run saves itself and ends; --resume goes on from there.

Read config.py, trainer.py (DDP, and the course's training loop, fed with what data.py reads on each
rank) and training.py; then strong_and_weak.py and data_parallel.py.
"""

import sys

from ranklab.projects.command import time_limit
from ranklab.projects.ddp import data_parallel, profile, report, run, said, strong_and_weak
from ranklab.projects.ddp.config import Options
from ranklab.projects.runner import Project, Shown


def act(options, config):
    if options.data_parallel:
        return data_parallel.compare(config)
    if options.profile:
        return said(*profile(config, options.profile, options.ranks, timeout=time_limit()))
    if options.scaling:
        rows = strong_and_weak.run(config, options.ranks, timeout=time_limit())
        return Shown(strong_and_weak.report(rows), lambda: strong_and_weak.figure(rows))
    progress = "bar" if sys.stderr.isatty() else "lines"
    return report(run(options.ranks, resume=options.resume, progress=progress,
                      timeout=time_limit(), **vars(config)))


project = Project(__package__, __doc__, Options, act)
main = project.main

if __name__ == "__main__":
    sys.exit(main())
