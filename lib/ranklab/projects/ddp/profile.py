"""A few steps of the run under the profiler, on all ranks: a file for the eye, and a verdict."""

from ranklab.ddp import diagnose
from ranklab.engine import is_main_process, launch
from ranklab.meter import Timeline, merged_trace
from ranklab.projects.ddp.data import open_data
from ranklab.projects.ddp.strong_and_weak import batches
from ranklab.projects.ddp.trainer import ImageTrainer

WARMUP = 4  # steps that are not recorded


def record(config, steps=4):
    """The Timeline of `steps` steps on this rank."""
    trainer = ImageTrainer(config, *open_data(config))
    source = batches(trainer)
    for _ in range(WARMUP):
        trainer.step(next(source))
    with Timeline() as timeline:
        for _ in range(steps):
            trainer.step(next(source))
    return timeline


def run(config, path, ranks=None, steps=4, timeout=600):
    """`path` holds the merged trace, for Perfetto; returns diagnose's verdict and shares."""
    timelines = launch(record, config, steps, ranks=ranks, timeout=timeout)
    if is_main_process():
        merged_trace(timelines, path)
    return diagnose([timeline.events for timeline in timelines])


def report(*arguments, **options):
    """What `run` found, as text."""
    verdict, shares = run(*arguments, **options)
    return f"{verdict}: " + ", ".join(f"{name} {part:.0%}" for name, part in shares.items())
