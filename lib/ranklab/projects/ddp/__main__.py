"""ResNet-50 with torch's DDP, from a laptop to several nodes, by the same command.

    python -m ranklab.projects.ddp --ranks 2                  laptop size, under a minute
    python -m ranklab.projects.ddp --ranks 4 --scaling        what more ranks bring
    torchrun --nproc-per-node 8 -m ranklab.projects.ddp --size full --data imagenet --compile \\
        --checkpoint run
    srun -N 4 --ntasks-per-node 8 python -m ranklab.projects.ddp --size full --data imagenet

A folder is read as ImageNet is laid out: train/<class>/*.JPEG and val/<class>/*.JPEG. After a
SIGTERM to torchrun or srun, the run saves a checkpoint and ends; --resume continues from it.

Read training.py and strong_and_weak.py; the training loop is the course's own, which
image_trainer.py feeds with images.
"""

import sys

from ranklab.projects import ddp
from ranklab.projects.command import time_limit
from ranklab.projects.ddp.training import Options
from ranklab.projects.runner import Project, Shown


def act(options, config):
    ranks, limit = options.ranks, time_limit()
    if options.profile:
        return ddp.profile(config, options.profile, ranks, timeout=limit)
    if options.scaling:
        rows = ddp.scaling(config, ranks, timeout=limit)
        return Shown(ddp.scaling_report(rows), lambda: ddp.figure(rows))
    return ddp.report(ddp.run(ranks=ranks, resume=options.resume, progress=True, timeout=limit,
                              **vars(config)))


project = Project(__package__, __doc__, Options, act)

if __name__ == "__main__":
    sys.exit(project.main())
