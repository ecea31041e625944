"""A ResNet is trained with DDP on all ranks; what the run brought, as text."""

import statistics
from dataclasses import replace
from functools import partial

from ranklab.ddp import compress_fp16_hook
from ranklab.engine import launch
from ranklab.projects.authors import authors
from ranklab.projects.command import LAUNCH_LIMIT, ranks_to_come
from ranklab.projects.ddp import strong_and_weak
from ranklab.projects.ddp.config import SIZES
from ranklab.projects.ddp.data import open_data, steps_in_epoch
from ranklab.projects.ddp.model import wrap
from ranklab.projects.ddp.trainer import ImageTrainer


def train(config, resume=False, until=None, progress=None, half=compress_fp16_hook):
    """On each rank: the model is trained; returns what `report` tells of it."""
    trainer = ImageTrainer(config, *open_data(config), progress=progress,
                           wrap=partial(wrap, half=half))
    if resume:
        trainer.resume()
    history = trainer.fit(until)
    score = None if trainer.stopped else (history.held_out.get(trainer.schedule.steps)
                                          or trainer.evaluate())  # fmt: skip
    return {"config": config, "ranks": trainer.parallel.ranks, "steps": trainer.steps_done,
            "of_steps": trainer.schedule.steps, "history": history, "score": score,
            "parameters": sum(p.numel() for p in trainer.model.parameters())}  # fmt: skip


def run(ranks=None, size="laptop", resume=False, until=None, progress=None, timeout=LAUNCH_LIMIT,
        half=compress_fp16_hook, **changes):  # fmt: skip
    """The model is trained on all ranks, to the end or to step `until`; returns a dict of numbers.
    half     the hook of compress="fp16"; a learner's own will do
    changes  of Config: data="folder", epochs=3, batch_per_rank=16, ...
    """
    config = replace(SIZES[size], **changes)
    if config.data == "synthetic":
        steps_in_epoch(config.images, config, ranks_to_come(ranks))  # refuses now, not on the ranks
    found = launch(train, config, resume, until, progress, half, ranks=ranks, timeout=timeout,
                   stream=progress is not None)[0]  # fmt: skip
    used = {"compress_fp16_hook": half} if config.compress == "fp16" else {}
    return {**found, "authors": authors(used) or "No function of lab 04: torch's DDP does it all."}


def scaling(ranks=None, size="laptop", steps=None, timeout=LAUNCH_LIMIT, **changes):
    """The rows of strong_and_weak.table, for table, explanation and plots.ddp.scaling."""
    return strong_and_weak.run(replace(SIZES[size], **changes), ranks, steps, timeout)


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
        found["authors"],
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
