"""The bubble monitor: how busy each stage of a real run is, and how long ranks wait."""

import statistics
from collections import defaultdict

import torch
import torch.distributed as dist

from ranklab.engine import device
from ranklab.pipeline_parallel import bubble_fraction, places, simulate
from ranklab.pipeline_parallel.deferred import WeightQueue
from ranklab.pipeline_parallel.emulated import SleepingStage
from ranklab.projects.clock import wait_for_all

SECONDS = 0.02  # that the forward of a mean stage sleeps


def monitor(spans, schedule):
    """(seconds for which each stage was busy, bubbles), by the measured spans of all ranks.

    bubbles  measured; simulated with the mean times of each stage; and for stages that are alike,
             which is what the formulas say
    """
    seconds, stages = defaultdict(list), range(len(places(schedule)))
    for _, (kind, stage, _), start, end in spans:
        seconds[kind, stage].append(end - start)
    busy = [sum(sum(seconds[kind, stage]) for kind in "FBIW") for stage in stages]
    means = [[statistics.mean(seconds[kind, stage] or [0]) for stage in stages] for kind in "FBIW"]
    simulated = simulate(schedule, *means)
    return busy, [bubble_fraction(each) for each in (spans, simulated, simulate(schedule))]


def above_mean(values):
    """By which part of the mean the largest is above it."""
    return max(values) / statistics.mean(values) - 1


def asleep(schedule, executor, costs):
    """The spans of this rank in a real run of `schedule` whose stages sleep, as `costs` says."""
    rank, queue, last = dist.get_rank(), WeightQueue(), len(costs) - 1
    unit = SECONDS / statistics.mean(costs)
    stages = {stage: SleepingStage(*[unit * costs[stage]] * 3, queue, stage == last)
              for stage, owner in places(schedule).items() if owner == rank}
    x = torch.ones(1, device=device())
    runner = executor(stages, last, torch.empty_like, None, queue, timed=True)
    wait_for_all()
    runner.run(schedule, [(x, x)] * (1 + max(action.micro_batch for action in schedule[rank])))
    return runner.spans
