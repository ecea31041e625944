"""A ResNet is trained with DDP on all ranks, or some of its steps are traced; and the report."""

import statistics
from dataclasses import replace
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from ranklab.data.image_folder import Augment, ImageFolder, SyntheticImages
from ranklab.data_parallel.training import DataParallel
from ranklab.ddp import compress_fp16_hook, diagnose
from ranklab.engine import device, is_main_process, launch
from ranklab.engine.report import count_ranks
from ranklab.meter import Timeline, merged_trace
from ranklab.models.resnet import ResNet
from ranklab.projects.authors import authors
from ranklab.projects.command import LAUNCH_LIMIT, ranks_to_come
from ranklab.projects.ddp.config import SIZES
from ranklab.projects.ddp.image_trainer import ImageTrainer
from ranklab.projects.training import median_speed

WARMUP = 4  # steps that are not in a trace


def run(ranks=None, size="laptop", resume=False, until=None, progress=False, timeout=LAUNCH_LIMIT,
        half=compress_fp16_hook, **changes):
    """The model is trained on all ranks, to the end or to step `until`; returns a dict of numbers.

    half     the hook of compress=True; a learner's own will do
    changes  of Config: data="folder", epochs=3, batch_per_rank=16, ...
    """
    config = replace(SIZES[size], **changes)
    if not config.data:  # refuses now, not on the ranks
        config.steps_per_epoch(config.images, ranks_to_come(ranks))
    return launch(train, config, resume, until, progress, half, ranks=ranks, timeout=timeout,
                  stream=progress)[0]


def train(config, resume, until, progress, half):
    """On each rank: the model is trained; returns what `report` tells of it."""
    trainer = new_trainer(config, half=half, progress=progress)
    if resume:
        trainer.resume()
    history = trainer.fit(until)
    at_the_end = history.held_out.get(trainer.schedule.steps)  # None: nothing was left to train
    top1 = trainer.evaluate() if at_the_end is None and not trainer.stopped else at_the_end
    used = {"compress_fp16_hook": half} if config.compress else {}
    return {"config": config, "ranks": trainer.parallel.ranks, "steps": trainer.steps_done,
            "of_steps": trainer.schedule.steps, "history": history, "top1": top1,
            "held_out": len(trainer.held_out),
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            "authors": authors(used) or "No function of lab 04: torch's DDP does it all."}


def new_trainer(config, group=None, half=compress_fp16_hook, progress=False):
    """On each rank of the group: an ImageTrainer of a ResNet in DDP, the same on all."""
    images, held_out = open_data(config)
    torch.manual_seed(config.seed)
    model = ResNet(config.shape(len(images.classes)))
    parallel = DataParallel(group, partial(wrap, config=config, half=half), equal_parts=True)
    return ImageTrainer(model, images, held_out, config, parallel, config.compile, progress)


def wrap(model, group, config, half):
    """`model` in DDP as production runs use it.

    gradient_as_bucket_view  gradients live in the buckets: no second copy of them stays in memory
    static_graph             every step uses the same parameters, so DDP looks for them once;
                             left off with torch.compile, which cuts the graph at buckets itself
    """
    here = device()
    ddp = DistributedDataParallel(
        model, device_ids=[here.index] if here.type != "cpu" else None, process_group=group,
        gradient_as_bucket_view=True, static_graph=not config.compile)
    if config.compress:
        ddp.register_comm_hook(group, half)
    return ddp


def open_data(config):
    """(images to train on, held-out images); a folder is listed, nothing is decoded yet."""
    if not config.data:
        made_up = partial(SyntheticImages, size=config.image, classes=config.classes,
                          seed=config.seed)
        return made_up(config.images), made_up(config.held_out, first=config.images)
    augment = Augment(config.smallest_crop, flip=config.flip, seed=config.seed)
    images = ImageFolder(config.data, "train", config.image, augment)
    return images, ImageFolder(config.data, "val", config.image, classes=images.classes)


def report(found):
    """What `run` found, as text."""
    config, history, speed = found["config"], found["history"], median_speed(found["history"])
    images = found["ranks"] * config.batch_per_rank
    lines = [
        f"model     {config.model} of width {config.width}, {found['parameters']:,} parameters, "
        f"{config.image} x {config.image} pixels, {config.precision}",
        f"training  {found['steps']:,} of {found['of_steps']:,} steps of {images:,} images: "
        f"{count_ranks(found['ranks'])} with {config.batch_per_rank} each",
        found["authors"],
    ]
    if speed > 0:  # not where nothing was logged
        wait = statistics.median(history.waits[1:] or history.waits)
        lines.append(f"speed     {speed:,.0f} images/s; {1e3 * images / speed:.1f} ms a step, of "
                     f"which the slowest loader takes {1e3 * wait:.1f}")
    goes_on = f"; {config.checkpoint} goes on with --resume" if config.checkpoint else ""
    lines.append(f"stopped   by SIGTERM{goes_on}" if found["top1"] is None else
                 f"held out  top-1 {found['top1']:.1%} of {found['held_out']:,} images")
    return "\n".join(lines)


def profile(config, path, ranks=None, steps=4, timeout=LAUNCH_LIMIT):
    """`path` holds the merged trace, for Perfetto; returns the verdict of diagnose, as text."""
    timelines = launch(record, config, steps, ranks=ranks, timeout=timeout)
    if is_main_process():
        merged_trace(timelines, path)
    verdict, shares = diagnose([timeline.events for timeline in timelines])
    return f"{verdict}: " + ", ".join(f"{name} {part:.0%}" for name, part in shares.items())


def record(config, steps):
    """On each rank: the Timeline of `steps` steps."""
    trainer = new_trainer(config)
    for _ in range(WARMUP):
        trainer.step()
    with Timeline() as timeline:
        for _ in range(steps):
            trainer.step()
    return timeline
