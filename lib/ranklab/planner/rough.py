"""A step's time by a rule of five lines (FLOPs, one efficiency, a bubble), and its errors on
published runs.
"""

import functools

from ranklab.planner.jobs import jobs
from ranklab.planner.published import all_runs
from ranklab.planner.score import quantile


def rough_step_seconds(model, plan, machine):
    """Return the seconds of a step by a rule of thumb: FLOPs, one efficiency, a bubble.

    FLOPs       model.flops_per_token(plan.sequence) for each token of the batch, divided among
                all GPUs; with forwards=2 if plan.recompute is "full"
    efficiency  the fraction of machine.peak_flops that a busy GPU reaches: one number for all
                runs, which you choose
    bubble      (P - 1) / (v M) of the busy time, in addition to it: plan.pp stages, plan.virtual,
                plan.micro_batches (lab 09)
    It must be within 15% for half of the published runs of dense models in bf16. More terms are
    welcome, as long as each of the rules above still holds within 10%.
    Lab: 13
    """
    efficiency = 0.52  # the best for these runs, found by trying; 0.48 to 0.57 are nearly as good
    forwards = 2 if plan.recompute == "full" else 1
    flops = plan.batch * plan.sequence * model.flops_per_token(plan.sequence, forwards=forwards)
    busy = flops / (plan.gpus * efficiency * machine.peak_flops)
    return busy * (1 + (plan.pp - 1) / (plan.virtual * plan.micro_batches))


@functools.cache
def rough_jobs():
    """Return the Jobs of all published runs of dense models in bf16 that have a step time."""
    return tuple(job for job in jobs(all_runs()) if job.seconds
                 and not job.model.experts and job.plan.precision == "bf16")


def rough_ratios(seconds_of, rows=None):
    """Return the ratio of predicted to published step time for each of the rows.

    seconds_of  rough_step_seconds, or a learner's
    rows        Jobs; None: rough_jobs()
    """
    return [seconds_of(job.model, job.plan, job.machine) / job.seconds
            for job in (rough_jobs() if rows is None else rows)]


def median_error(ratios):
    """Return the median of |ratio - 1|."""
    return quantile([abs(ratio - 1) for ratio in ratios], 0.5)
