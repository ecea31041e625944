"""rough_step_seconds: five rules that must hold, then its median error on published runs.

The rules are ratios of two predictions, so any efficiency will do, and other terms may be added as
long as they are small. The measured times of clusters have the last word.
"""

import math
from dataclasses import replace
from typing import NamedTuple

from ranklab.checks.exercise import Exercise
from ranklab.checks.looks import expect
from ranklab.checks.prover import Slip
from ranklab.checks.trial import called_with
from ranklab.planner.catalog import MODELS, find_node
from ranklab.planner.plan import Plan
from ranklab.planner.rough import median_error, rough_jobs, rough_ratios, rough_step_seconds
from ranklab.planner.score import quantile, step_ratio

MOST = 0.15  # the median error; with the contract's rules it is below for 48% to 57% of the peak
NEAR = 0.1  # how far off a ratio may be
A100, H100 = find_node("a100-dgx"), find_node("h100-dgx")
FLAT = Plan(dp=64, zero=3, sequence=4096, micro_batches=4)
PIPED = Plan(dp=4, tp=4, pp=8, sequence=4096, micro_batches=64, zero=1, sequence_parallel=True)
FEW = replace(PIPED, micro_batches=8)

SECONDS = "Return the seconds of a step, a number above 0."
SHARED = "All GPUs share the FLOPs of the whole batch: plan.batch sequences over plan.gpus GPUs."
FLOPS = ("The FLOPs of a token depend on the model and the sequence: "
         "model.flops_per_token(plan.sequence).")
AGAIN = 'With plan.recompute == "full" the forward runs twice: forwards=2.'
BUBBLE = "The bubble is (P - 1) / (v M) of the busy time, in addition to it: none for one stage."
PEAK = "Divide by the machine's own peak_flops."
UNITS = ("This is off by more than a factor of two. Divide the step's FLOPs by GPUs x efficiency "
         "x peak_flops of one GPU, with an efficiency near 0.5.")
EFFICIENCY = "Change the efficiency: a higher one makes every predicted time shorter."


class Rule(NamedTuple):
    """Two training runs; the second takes `times` as long as the first."""

    holds: str
    first: tuple
    second: tuple
    says: str

    def times(self):
        return by_hand(*self.second) / by_hand(*self.first)


def by_hand(model, plan, machine):
    """Return the seconds of a step at the peak: parameters and attention, forward and backward.
    """
    passes = 4 if plan.recompute == "full" else 3
    token = passes * (2 * model.active + 4 * model.layers * plan.sequence * model.width)
    slots = plan.virtual * plan.micro_batches
    return (plan.dp * plan.micro_batch * plan.micro_batches * plan.sequence * token
            / (plan.dp * plan.tp * plan.pp * machine.peak_flops) * (slots + plan.pp - 1) / slots)


EIGHT, SEVENTY = MODELS["llama-8b"], MODELS["llama-70b"]
RULES = (
    Rule("twice the data ranks with twice the batch take the same time",
         (EIGHT, FLAT, A100), (EIGHT, replace(FLAT, dp=128), A100), SHARED),
    Rule("twice the tensor ranks, with the same batch, take half the time",
         (SEVENTY, PIPED, H100), (SEVENTY, replace(PIPED, tp=8), H100), SHARED),
    Rule("twice the sequences in a micro-batch take twice the time",
         (EIGHT, FLAT, A100), (EIGHT, replace(FLAT, micro_batch=2), A100), SHARED),
    Rule("a longer sequence has more FLOPs a token",
         (EIGHT, FLAT, A100), (EIGHT, replace(FLAT, sequence=32768), A100), FLOPS),
    Rule("a larger model has more FLOPs a token",
         (EIGHT, FLAT, A100), (SEVENTY, FLAT, A100), FLOPS),
    Rule("a forward that runs again counts",
         (EIGHT, FLAT, A100), (EIGHT, replace(FLAT, recompute="full"), A100), AGAIN),
    Rule("a GPU with a higher peak takes less time",
         (EIGHT, FLAT, A100), (EIGHT, FLAT, H100), PEAK),
    Rule("one stage has no bubble",
         (EIGHT, FLAT, A100), (EIGHT, replace(FLAT, micro_batches=1), A100), BUBBLE),
    Rule("eight stages wait longer with 8 micro-batches than with 64",
         (SEVENTY, PIPED, H100), (SEVENTY, FEW, H100), BUBBLE),
    Rule("five virtual stages make the bubble shorter", (SEVENTY, FEW, H100),
         (SEVENTY, replace(FEW, virtual=5, schedule="interleaved"), H100), BUBBLE),
)


def check_rough_step_seconds(rough_step_seconds):
    for rule in RULES:
        first, second = (_seconds(rough_step_seconds, *each) for each in (rule.first, rule.second))
        expect(abs(second / first / rule.times() - 1) <= NEAR,
               f"{rule.holds}: {second / first:.3g} times as long, not {rule.times():.3g}",
               rule.says)
    yield "batch, GPUs, model, sequence, recomputation and bubble count as they should"
    with called_with("the model, plan and machine of a published run"):
        ratios = rough_ratios(rough_step_seconds)
    middle, error = quantile(ratios, 0.5), median_error(ratios)
    library = median_error([step_ratio(job) for job in rough_jobs()])
    score = (f"on {len(ratios)} published runs yours is off by {error:.1%} in the median, "
             f"step_time by {library:.1%}")
    expect(1 / 2 < middle < 2, f"{score}: half of the predictions are "
           f"above {middle:.3g} times the published time",
           UNITS)
    expect(error <= MOST, f"{score}, but at most {MOST:.0%} is allowed; half of the predictions "
                          f"are above {middle:.2f} times the published time", EFFICIENCY)
    yield f"{score}: what is missing?"


def _seconds(fn, model, plan, machine):
    with called_with(f"{model.parameters / 1e9:.0f} billion parameters, {plan.words()}, "
                     f"{machine.name}"):
        seconds = fn(model, plan, machine)
    expect(isinstance(seconds, int | float) and math.isfinite(seconds) and seconds > 0,
           f"{plan.words()}: {seconds!r:.60} is returned", SECONDS)
    return seconds


SHARE, RERUN = "plan.gpus * efficiency", ", forwards=forwards"
PART = "(plan.pp - 1) / (plan.virtual * plan.micro_batches)"
BUSY = "    return busy * (1 +"
ROUGH = Exercise(
    rough_step_seconds, check_rough_step_seconds, mistakes=(
        Slip(SECONDS, (BUSY, BUSY.replace("return ", "seconds = "))),
        Slip(SHARED, (SHARE, "efficiency"), (SHARE, "plan.dp * efficiency"),
             ("plan.batch * plan.sequence", "plan.micro_batches * plan.sequence"),
             ("plan.batch * plan.sequence", "plan.tokens * plan.micro_batches")),
        Slip(FLOPS, ("model.flops_per_token(plan.sequence, forwards=forwards)",
                     "6 * model.parameters * (4 / 3 if forwards == 2 else 1)"),
             ("flops_per_token(plan.sequence,", "flops_per_token(2048,")),
        Slip(AGAIN, (RERUN, ""), ("= 2 if plan", "= 3 if plan")),
        Slip(PEAK, ("machine.peak_flops)", "312e12)"), ("machine.peak_flops)", "989e12)")),
        Slip(BUBBLE, (f" * (1 + {PART})", ""), (PART, "(plan.pp - 1) / plan.micro_batches"),
             (PART, "(plan.pp - 1) / (plan.virtual * plan.micro_batches + plan.pp - 1)"),
             (PART, "plan.pp / (plan.virtual * plan.micro_batches)")),
        Slip(UNITS, ("efficiency = 0.52", "efficiency = 52"),
             ("* efficiency *", "* 8 * efficiency *"), ("/ (plan.gpus", "/ 3600 / (plan.gpus")),
        Slip(EFFICIENCY, ("efficiency = 0.52", "efficiency = 1.0"),
             ("efficiency = 0.52", "efficiency = 0.4"), ("efficiency = 0.52", "efficiency = 0.65")),
        Slip("it calls the library's own rough_step_seconds",
             ("    efficiency = 0.52", "    from ranklab.planner import rough\n    return "
              "rough.rough_step_seconds(model, plan, machine)\n    efficiency = 0.52")),
    ), hints=(
        "What has to be computed in a step, by how many GPUs, and how fast is each?",
        "The busy time is FLOPs of the whole batch / (plan.gpus * efficiency * "
        "machine.peak_flops). In lab 09 the bubble was (P - 1) / M of it, and with v virtual "
        "stages 1/v of that.",
        "busy * (1 + (plan.pp - 1) / (plan.virtual * plan.micro_batches)), where flops = "
        "plan.batch * plan.sequence * model.flops_per_token(plan.sequence, forwards=2 or 1)"))
