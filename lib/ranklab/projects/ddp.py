"""ResNet-50 with torch's DDP, from a laptop to several nodes: the same command, more of it.

    python -m ranklab.projects.ddp --ranks 2                  laptop size, under a minute
    python -m ranklab.projects.ddp --ranks 4 --scaling        what more ranks bring
    torchrun --nproc-per-node 8 -m ranklab.projects.ddp --size full --data imagenet --compile \\
        --checkpoint run
    srun -N 4 --ntasks-per-node 8 python -m ranklab.projects.ddp --size full --data imagenet

A folder is read as ImageNet is laid out: train/<class>/*.JPEG and val/<class>/*.JPEG. After a
SIGTERM to torchrun or srun the run saves itself and ends; --resume goes on from there.

    ddp_config.py         Config, its two sizes, the learning rate
    ddp_data.py           what each rank reads
    ddp_trainer.py        ImageTrainer: the course's training loop, fed with images
    ddp_scaling.py        strong and weak scaling
    ddp_profile.py        a trace of all ranks, and what it says
    ddp_data_parallel.py  nn.DataParallel against DDP
"""

import argparse
import statistics
import sys
from dataclasses import fields, replace

from ranklab.engine import is_main_process, launch
from ranklab.engine.in_place import is_started_by_another
from ranklab.projects import ddp_data_parallel, ddp_profile, ddp_scaling
from ranklab.projects.ddp_config import COMPRESSIONS, MODELS, SIZES
from ranklab.projects.ddp_data import open_data
from ranklab.projects.ddp_trainer import ImageTrainer
from ranklab.trainer import PRECISIONS

# Under torchrun and srun the limit is that of a collective: a dead rank is noticed after it. Ranks
# of launch have all their time together.
COLLECTIVE_LIMIT, LAUNCH_LIMIT = 600, 24 * 3600
# Options whose help says more than the field of Config would.
HELP = {
    "data": "synthetic, or a folder with train/<class>/ and val/<class>/",
    "image": "pixels along each side",
    "batch_per_rank": "images in a step on each rank; the learning rate grows with all of them",
    "lr": "for 256 images a step",
    "norm": "batch, or group: the same for any number of ranks",
    "smallest_crop": "part of the area that a random crop keeps at least",
    "workers": "processes per rank that read images",
    "log_every": "steps; also how long a SIGTERM waits for an answer",
    "checkpoint": "save to this folder",
    "checkpoint_every": "steps; by default after each epoch",
}  # fmt: skip
CHOICES = {"model": MODELS, "precision": PRECISIONS, "compress": COMPRESSIONS,
           "norm": ("batch", "group")}  # fmt: skip


def train(config, resume=False, until=None, progress=None):
    """On each rank: the model is trained; returns what `report` tells of it."""
    trainer = ImageTrainer(config, *open_data(config), progress=progress)
    if resume:
        trainer.resume()
    history = trainer.fit(until)
    score = None if trainer.stopped else (history.held_out.get(trainer.schedule.steps)
                                          or trainer.evaluate())  # fmt: skip
    return {"config": config, "ranks": trainer.parallel.ranks, "steps": trainer.steps_done,
            "of_steps": trainer.schedule.steps, "history": history, "score": score,
            "parameters": sum(p.numel() for p in trainer.model.parameters())}  # fmt: skip


def run(ranks=None, size="laptop", resume=False, until=None, progress=None, timeout=LAUNCH_LIMIT,
        **changes):  # fmt: skip
    """The model is trained on all ranks, to the end or to step `until`; returns a dict of numbers.
    changes  of Config: data="folder", epochs=3, batch_per_rank=16, ...
    """
    config = replace(SIZES[size], **changes)
    return launch(train, config, resume, until, progress, ranks=ranks, timeout=timeout,
                  stream=progress is not None)[0]  # fmt: skip


def scaling(ranks=None, size="laptop", steps=None, timeout=LAUNCH_LIMIT, **changes):
    """The rows of ddp_scaling's table, for table, explanation and plots.ddp.scaling."""
    return ddp_scaling.run(replace(SIZES[size], **changes), ranks, steps, timeout)


def report(found):
    """What `run` found, as text."""
    config, history, score = found["config"], found["history"], found["score"]
    images = found["ranks"] * config.batch_per_rank
    speeds = [speed for speed in history.speed if speed]
    waits = history.waits[1:] or history.waits
    lines = [
        f"model     {config.model} of width {config.width}, {found['parameters']:,} parameters, "
        f"{config.image} x {config.image} pixels, {config.precision}",
        f"training  {found['steps']:,} of {found['of_steps']:,} steps of {images:,} images: "
        f"{found['ranks']} ranks with {config.batch_per_rank} each",
    ]
    if speeds:
        speed = statistics.median(speeds)
        wait, step = statistics.median(waits), images / speed
        lines.append(f"speed     {speed:,.0f} images/s; {1e3 * step:.1f} ms a step, of which the "
                     f"slowest loader takes {1e3 * wait:.1f}")  # fmt: skip
    if score is None:
        lines.append("stopped   by SIGTERM" + (f"; {config.checkpoint} goes on with --resume"
                                               if config.checkpoint else ""))  # fmt: skip
    else:
        lines.append(f"held out  top-1 {score.top1:.1%}, top-5 {score.top5:.1%}, loss "
                     f"{score.loss:.3f} on {score.images:,} images")  # fmt: skip
    return "\n".join(lines)


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="laptop", help="the other defaults")
    parser.add_argument("--ranks", type=int, help="without torchrun or srun: how many")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument("--scaling", action="store_true", help="strong and weak scaling")
    parser.add_argument("--figure", help="with --scaling: write the plot to this .svg or .png")
    parser.add_argument("--profile", metavar="FILE", help="a trace of a few steps, for Perfetto")
    parser.add_argument("--data-parallel", action="store_true", help="nn.DataParallel against DDP")
    for one in fields(SIZES["laptop"]):
        name = f"--{one.name.replace('_', '-')}"
        if one.type is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction)
        else:
            kind = one.type if one.type in (int, float) else str
            parser.add_argument(name, type=kind, choices=CHOICES.get(one.name),
                                help=HELP.get(one.name))  # fmt: skip
    options = vars(parser.parse_args(argv))
    if options["resume"] and not options["checkpoint"]:
        parser.error("--resume goes on from a folder: name it with --checkpoint")
    return options


def main(argv=None):
    options = parse(argv)
    size, ranks, resume, with_scaling, figure, profile, data_parallel = (
        options.pop(name) for name in ("size", "ranks", "resume", "scaling", "figure", "profile",
                                       "data_parallel"))  # fmt: skip
    changes = {name: value for name, value in options.items() if value is not None}
    config = replace(SIZES[size], **changes)
    limit = COLLECTIVE_LIMIT if is_started_by_another() else LAUNCH_LIMIT
    if data_parallel:
        print(ddp_data_parallel.compare(config))
    elif profile:
        verdict, shares = ddp_profile.run(config, profile, ranks, timeout=limit)
        say(f"{verdict}: " + ", ".join(f"{name} {part:.0%}" for name, part in shares.items()))
    elif with_scaling:
        rows = scaling(ranks, size, timeout=limit, **changes)
        say(ddp_scaling.table(rows), ddp_scaling.explanation(rows))
        if figure and is_main_process():
            draw(rows, figure)
    else:
        progress = "bar" if sys.stderr.isatty() else "lines"
        say(report(run(ranks, size, resume, None, progress, limit, **changes)))
    return 0


def say(*texts):
    if is_main_process():
        print("\n".join(filter(None, texts)))


def draw(rows, path):
    """The scaling plot is in the file `path`."""
    from ranklab.plots import ddp as plots  # here: the only lines that need matplotlib
    from ranklab.plots.style import save

    save(plots.scaling(rows), path)


if __name__ == "__main__":
    sys.exit(main())
