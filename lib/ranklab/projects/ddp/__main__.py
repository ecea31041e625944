"""ResNet-50 with torch's DDP, from a laptop to several nodes: the same command, more of it.

    python -m ranklab.projects.ddp --ranks 2                  laptop size, under a minute
    python -m ranklab.projects.ddp --ranks 4 --scaling        what more ranks bring
    torchrun --nproc-per-node 8 -m ranklab.projects.ddp --size full --data imagenet --compile \\
        --checkpoint run
    srun -N 4 --ntasks-per-node 8 python -m ranklab.projects.ddp --size full --data imagenet

A folder is read as ImageNet is laid out: train/<class>/*.JPEG and val/<class>/*.JPEG. After a
SIGTERM to torchrun or srun the run saves itself and ends; --resume goes on from there.

Read config.py, data.py (what each rank reads), model.py, trainer.py (the course's training loop,
fed with images) and training.py; then strong_and_weak.py, profile.py and data_parallel.py.
"""

import sys

from ranklab.options import new_file
from ranklab.projects.command import Command, refusals, save_figure, say, time_limit
from ranklab.projects.ddp import data_parallel, profile, report, run, strong_and_weak
from ranklab.projects.ddp.config import SIZES


def parse(argv=None):
    """(the options, the Config)."""
    command = Command(__package__, __doc__)
    command.add_argument("--size", choices=SIZES, default="laptop", help="the other defaults")
    command.add_ranks()
    command.add_resume()
    command.add_argument("--scaling", action="store_true", help="strong and weak scaling")
    command.add_figure("with --scaling: draw it in this .svg or .png")
    command.add_argument("--profile", metavar="FILE", type=new_file,
                         help="a trace of a few steps, for Perfetto")
    command.add_argument("--data-parallel", action="store_true", help="nn.DataParallel against DDP")
    command.add_fields(SIZES["laptop"])
    options = command.parse(argv)
    if options.figure and not options.scaling:
        command.error("--figure draws what --scaling has found")
    return options, command.config(SIZES[options.size], options)


@refusals(__package__)
def main(argv=None):
    options, config = parse(argv)
    if options.data_parallel:
        say(data_parallel.compare(config))
    elif options.profile:
        verdict, shares = profile.run(config, options.profile, options.ranks, timeout=time_limit())
        say(f"{verdict}: " + ", ".join(f"{name} {part:.0%}" for name, part in shares.items()))
    elif options.scaling:
        rows = strong_and_weak.run(config, options.ranks, timeout=time_limit())
        say(strong_and_weak.table(rows), strong_and_weak.explanation(rows))
        save_figure(options.figure, lambda: draw(rows))
    else:
        progress = "bar" if sys.stderr.isatty() else "lines"
        say(report(run(options.ranks, resume=options.resume, progress=progress,
                       timeout=time_limit(), **vars(config))))
    return 0


def draw(rows):
    from ranklab.plots import ddp as plots  # here: the only line that needs matplotlib

    return plots.scaling(rows)


if __name__ == "__main__":
    sys.exit(main())
