"""Strong and weak scaling in one run: what do more ranks gain?

    strong   the same images in a step, divided among the ranks: the step should get shorter
    weak     as many images on each rank, more of them in a step: the step should stay as long

Both begin at one rank with batch_per_rank images. Each step uses the same batch again, so that
computing and communication are measured, and not the loader.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.basics.machine import cores
from ranklab.ddp import scaling_efficiency
from ranklab.engine import launch
from ranklab.meter.text import lined_up
from ranklab.projects.clock import in_turns
from ranklab.projects.command import LAUNCH_LIMIT, ranks_to_come
from ranklab.projects.ddp.training import new_trainer


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


def scaling(config, ranks=None, steps=20, timeout=LAUNCH_LIMIT, efficiency=scaling_efficiency):
    """Return [Measured], strong scaling first, then weak, by ranks.

    efficiency  scaling_efficiency, or a learner's own
    Raises ValueError if the ranks can't share batch_per_rank evenly.
    """
    plan = batches(ranks_to_come(ranks), config.batch_per_rank)
    times = launch(measure, config, plan, steps, ranks=ranks, timeout=timeout)[0]
    rows = []
    for kind, per_rank in plan.items():
        seconds = {R: times[R, batch] for R, batch in per_rank.items()}
        shares = efficiency(seconds, kind)
        rows += [Measured(kind, R, per_rank[R], seconds[R], shares[R]) for R in seconds]
    return rows


def batches(ranks, batch_per_rank):
    """Return {kind: {ranks: images per rank}}, for 1, 2, 4, ... ranks and all of them."""
    sizes = [*(2**k for k in range((ranks - 1).bit_length())), ranks]
    if unfit := [R for R in sizes if batch_per_rank % R]:
        raise ValueError(f"batch_per_rank={batch_per_rank} is what strong scaling divides: "
                         f"{unfit[0]} ranks can't share it evenly")
    return {"strong": {R: batch_per_rank // R for R in sizes},
            "weak": dict.fromkeys(sizes, batch_per_rank)}


def measure(config, plan, steps):
    """Return {(ranks, images per rank): seconds of a step, until the slowest is done}."""
    calls = {}
    for R, batch in (point for per_rank in plan.values() for point in per_rank.items()):
        group = dist.new_group(range(R))  # every rank takes part
        calls[R, batch] = lambda: None  # a rank that is left out waits for the others
        if dist.get_rank() < R:
            trainer = new_trainer(replace(config, batch_per_rank=batch), group)
            calls[R, batch] = partial(trainer.step, trainer.next_batch())
            trainer.batches = None  # its workers end
    # The shortest counts: other load on the machine only adds.
    return {point: min(times) for point, times in in_turns(calls, steps).items()}


def scaling_report(rows):
    """Return the table as text, with a note on what this machine can't show."""
    lines = [lined_up(("scaling", "ranks", "batch/rank", "images/s", "ms/step", "efficiency"), [
        (r.kind, r.ranks, r.batch, f"{r.images_per_second:,.0f}", f"{1e3 * r.seconds:.1f}",
         f"{r.efficiency:.0%}") for r in rows])]
    most, available = max(r.ranks for r in rows), cores()
    if not torch.cuda.is_available() and most > available:
        lines.append(f"{most} ranks share {available} cores: past {available} nothing gets faster. "
                     "That is this machine, not DDP.")
    return "\n".join(lines)


def figure(rows):
    from ranklab.plots import ddp as plots  # here: the only line that needs matplotlib

    return plots.scaling(rows)
