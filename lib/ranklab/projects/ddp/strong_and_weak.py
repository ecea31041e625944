"""Strong and weak scaling in one run: what do more ranks bring?

    strong   the same images in a step, divided among the ranks: the step should get shorter
    weak     the same images on each rank, more of them in a step: the step should stay as long

Both begin at one rank with batch_per_rank images. Ranks that a measurement leaves out wait.
"""

import time
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.ddp import scaling_efficiency
from ranklab.engine import device, launch
from ranklab.machine import cores
from ranklab.projects.clock import finish
from ranklab.projects.command import ranks_to_come
from ranklab.projects.ddp.data import PREFETCH, open_data
from ranklab.projects.ddp.trainer import ImageTrainer

KINDS = "strong", "weak"
WARMUP = 2  # steps before the clock starts: memory is allocated, workers fill their queues
ROUNDS = 3  # of which the best counts: whatever else the machine does can only add


class Measured(NamedTuple):
    """One line of the table."""

    kind: str  # "strong" or "weak"
    ranks: int
    batch: int  # images per rank
    seconds: float  # per step
    efficiency: float

    @property
    def images_per_second(self):
        return self.ranks * self.batch / self.seconds


def sizes(ranks):
    """1, 2, 4, ... up to `ranks`, which is the last in any case."""
    return [*(2**k for k in range((ranks - 1).bit_length())), ranks]


def batches_of(kind, ranks, batch_per_rank):
    """{ranks: images per rank} of the measurements of one kind."""
    if kind == "weak":
        return dict.fromkeys(sizes(ranks), batch_per_rank)
    for R in sizes(ranks):
        if batch_per_rank % R:
            raise ValueError(f"batch_per_rank={batch_per_rank} is what strong scaling divides: "
                             f"{R} ranks can't share it evenly")
    return {R: batch_per_rank // R for R in sizes(ranks)}


def seconds_per_step(trainer, steps):
    """The time of a step on this rank, loader included."""
    for _ in range(WARMUP):
        trainer.step()
    finish()
    start = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    finish()
    seconds = time.perf_counter() - start
    trainer.batches = None  # its workers end, before others are measured
    return seconds / steps


def enough_steps(config):
    """Enough that batches which workers had ready before the clock started don't decide."""
    return 4 + 2 * PREFETCH * config.workers


def measure(config, steps):
    """{(ranks, images per rank): seconds per step}, of the slowest rank; the same on every rank."""
    world, rank, data = dist.get_world_size(), dist.get_rank(), open_data(config)
    points = sorted({point for kind in KINDS
                     for point in batches_of(kind, world, config.batch_per_rank).items()})
    groups = {R: dist.new_group(range(R)) for R in sizes(world)}  # every rank takes part
    trainers = {(R, batch): ImageTrainer(replace(config, batch_per_rank=batch, epochs=1), data,
                                         groups[R]) for R, batch in points if rank < R}
    best = dict.fromkeys(points, float("inf"))
    for _ in range(ROUNDS):  # each measures all, so that a busy moment hits all alike
        for point in points:
            here = torch.zeros((), dtype=torch.float64, device=device())
            if point in trainers:
                here += seconds_per_step(trainers[point], steps)
            dist.all_reduce(here, dist.ReduceOp.MAX)  # here the ranks that are left out wait
            best[point] = min(best[point], here.item())
    return best


def run(config, ranks=None, steps=None, timeout=3600):
    """The rows of the table: strong scaling first, then weak, by ranks."""
    batches_of("strong", ranks_to_come(ranks), config.batch_per_rank)  # refuses what can't be
    seen = launch(measure, config, steps or enough_steps(config), ranks=ranks, timeout=timeout)
    rows = []
    for kind in KINDS:
        per_rank = batches_of(kind, len(seen), config.batch_per_rank)
        seconds = {R: seen[0][R, batch] for R, batch in per_rank.items()}
        efficiency = scaling_efficiency(seconds, kind)
        rows += [Measured(kind, R, per_rank[R], seconds[R], efficiency[R]) for R in seconds]
    return rows


def table(rows):
    """`rows` as text."""
    lines = [f"{'scaling':8}{'ranks':>6}{'batch/rank':>12}{'images/s':>12}{'ms/step':>10}"
             f"{'efficiency':>12}"]
    lines += [f"{r.kind:8}{r.ranks:6}{r.batch:12}{r.images_per_second:12,.0f}"
              f"{1e3 * r.seconds:10.1f}{r.efficiency:12.0%}" for r in rows]
    return "\n".join(lines)


def report(rows):
    """The table, and what this machine can't show."""
    return "\n".join(filter(None, [table(rows), explanation(rows)]))


def figure(rows):
    from ranklab.plots import ddp as plots  # here: the only line that needs matplotlib

    return plots.scaling(rows)


def explanation(rows):
    """What this machine can't show, in a sentence; "" where it can."""
    most, here = max(r.ranks for r in rows), cores()
    if torch.cuda.is_available() or most <= here:
        return ""
    return (f"{most} ranks share {here} cores here: past {here} ranks nothing can get faster, so "
            "the efficiency falls. That is this machine, not DDP.")
