"""A ResNet is trained with DDP on all ranks; what the run brought, as text."""

import statistics
from dataclasses import replace
from functools import partial

from ranklab.ddp import compress_fp16_hook, diagnose
from ranklab.engine import is_main_process, launch
from ranklab.meter import Timeline, merged_trace
from ranklab.projects.authors import authors
from ranklab.projects.command import LAUNCH_LIMIT, ranks_to_come
from ranklab.projects.costs import median_speed
from ranklab.projects.ddp import strong_and_weak
from ranklab.projects.ddp.config import SIZES
from ranklab.projects.ddp.data import steps_in_epoch
from ranklab.projects.ddp.trainer import ImageTrainer, told, wrap

WARMUP = 4  # steps that are not in a trace


def train(config, resume=False, until=None, progress=None, half=compress_fp16_hook):
    """On each rank: the model is trained; returns what `report` tells of it."""
    trainer = ImageTrainer(config, progress=progress, wrap=partial(wrap, half=half))
    if resume:
        trainer.resume()
    history = trainer.fit(until)
    score = None if trainer.stopped else (history.held_out.get(trainer.schedule.steps)
                                          or trainer.evaluate())
    return {"config": config, "ranks": trainer.parallel.ranks, "steps": trainer.steps_done,
            "of_steps": trainer.schedule.steps, "history": history, "score": score,
            "parameters": sum(p.numel() for p in trainer.model.parameters())}


def run(ranks=None, size="laptop", resume=False, until=None, progress=None, timeout=LAUNCH_LIMIT,
        half=compress_fp16_hook, **changes):
    """The model is trained on all ranks, to the end or to step `until`; returns a dict of numbers.
    half     the hook of compress="fp16"; a learner's own will do
    changes  of Config: data="folder", epochs=3, batch_per_rank=16, ...
    """
    config = replace(SIZES[size], **changes)
    if config.data == "synthetic":
        steps_in_epoch(config.images, config, ranks_to_come(ranks))  # refuses now, not on the ranks
    found = launch(train, config, resume, until, progress, half, ranks=ranks, timeout=timeout,
                   stream=progress is not None)[0]
    used = {"compress_fp16_hook": half} if config.compress == "fp16" else {}
    return {**found, "authors": authors(used) or "No function of lab 04: torch's DDP does it all."}


def scaling(ranks=None, size="laptop", steps=None, timeout=LAUNCH_LIMIT, **changes):
    """The rows of strong_and_weak.table, for table, explanation and plots.ddp.scaling."""
    return strong_and_weak.run(replace(SIZES[size], **changes), ranks, steps, timeout)


def record(config, steps):
    """The Timeline of `steps` steps on this rank."""
    trainer = ImageTrainer(config)
    for _ in range(WARMUP):
        trainer.step()
    with Timeline() as timeline:
        for _ in range(steps):
            trainer.step()
    return timeline


def profile(config, path, ranks=None, steps=4, timeout=600):
    """`path` holds the merged trace, for Perfetto; returns diagnose's verdict and shares."""
    timelines = launch(record, config, steps, ranks=ranks, timeout=timeout)
    if is_main_process():
        merged_trace(timelines, path)
    return diagnose([timeline.events for timeline in timelines])


def said(verdict, shares):
    """What `profile` found, as text."""
    return f"{verdict}: " + ", ".join(f"{name} {part:.0%}" for name, part in shares.items())


def report(found):
    """What `run` found, as text."""
    config, history, score = found["config"], found["history"], found["score"]
    images, speed = found["ranks"] * config.batch_per_rank, median_speed(history)
    lines = [
        f"model     {config.model} of width {config.width}, {found['parameters']:,} parameters, "
        f"{config.image} x {config.image} pixels, {config.precision}",
        f"training  {found['steps']:,} of {found['of_steps']:,} steps of {images:,} images: "
        f"{found['ranks']} ranks with {config.batch_per_rank} each",
        found["authors"],
    ]
    if speed > 0:  # not where nothing was logged
        wait = statistics.median(history.waits[1:] or history.waits)
        lines.append(f"speed     {speed:,.0f} images/s; {1e3 * images / speed:.1f} ms a step, of "
                     f"which the slowest loader takes {1e3 * wait:.1f}")
    goes_on = f"; {config.checkpoint} goes on with --resume" if config.checkpoint else ""
    lines.append(f"held out  {told(score)}" if score else f"stopped   by SIGTERM{goes_on}")
    return "\n".join(lines)
