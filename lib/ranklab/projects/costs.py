"""What one training step costs, counted: for the tables of projects."""

import contextlib
import statistics

import torch

from ranklab.engine import device
from ranklab.meter import MemoryCurve, Traffic


def counted_step(trainer, optimizer, look, bytes_of=lambda memory: memory.total, **held):
    """The trainer has done one more step; ([what look() has seen], peak bytes, bytes sent).

    look      called before each of the optimizer's steps
    bytes_of  Memory -> the bytes that count for the peak. It is taken on rank 0 alone, whose
              numbers are shown: it makes every op slower. A GPU counts its peak itself
    held      what MemoryCurve is told of: shards=, gathered=, communication=
    """
    seen, curve, on_gpu = [], None, device().type == "cuda"
    hook = optimizer.register_step_pre_hook(lambda *_: seen.append(look()))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    elif trainer.parallel.rank == 0:
        curve = MemoryCurve(trainer.model, optimizer, **held)
    with Traffic() as traffic, curve or contextlib.nullcontext():
        trainer.step()
    hook.remove()
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return seen, max(map(bytes_of, curve.points)) if curve else peak, traffic.sent_bytes


def median_speed(history):
    """The middle one of all stretches that were logged; NaN without any."""
    return statistics.median([speed for speed in history.speed if speed] or [float("nan")])


def fit_counted(trainer, count, until=None):
    """Trained to the end, or to step `until`: (what count() gives, the score at the end).

    count  does one step and counts. It is the second one: the first makes the optimizer's state,
           and shows a sharded model the order of its parts
    None stands for what is not there: costs of fewer than three steps, and the score of a training
    that a SIGTERM has stopped, because then there is no time left.
    """
    costs, score, last = None, None, trainer.schedule.steps
    if min(until or last, last) - trainer.steps_done > 2:
        trainer.step()
        costs = count()
    history = trainer.fit(until)
    if not trainer.stopped:
        score = history.held_out.get(trainer.steps_done) or trainer.evaluate()
    return costs, score
