"""The exercises and predictions of lab 13, in the order of the lab."""

from ranklab import planner
from ranklab.checks.exercise import Exercise
from ranklab.checks.planner.memory import check_memory_per_gpu
from ranklab.checks.planner.predictions import PREDICTIONS
from ranklab.checks.planner.scale import check_cost_per_token, check_scaling_curve
from ranklab.checks.planner.search import check_search_layouts
from ranklab.checks.planner.step import check_step_time

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    Exercise(planner.memory_per_gpu, check_memory_per_gpu, hints=(
        "What is there once, what once for each layer, and what for each micro-batch in flight?",
        "For each pipeline rank: states of both kinds of numbers; micro-batches in flight times "
        "layers times what one keeps, and with recompute one layer more; logits on the last one. "
        "Then the fullest by its total.",
        "dense = states(plan, tool, numbers, plan.sharders); sparse = states(plan, tool, experts, "
        "max(1, plan.copies * plan.tp // plan.ep)); activations = in_flight(plan, rank) * layers * "
        "kept + again; the optimizer times (not plan.offload)",
    )),
    Exercise(planner.step_time, check_step_time, hints=(
        "How much of all layers does one of pp GPUs compute, for each of how many micro-batches?",
        "busy: M / P times all parts of layers and head. The bubble is a part of all time: from "
        "part of the whole to part of the rest it is part / (1 - part).",
        "fullest = max(n * layer + (rank == P - 1) * ends for rank, n in enumerate(plan.stages("
        "model.layers))); bubble = (busy + sent) * part / (1 - part) + max(0, M * fullest - busy)",
    )),
    Exercise(planner.cost_per_token, check_cost_per_token, hints=(
        "Dollars in a second, and tokens in a second.",
        "mfu * machine.peak_flops FLOPs of each second are the model's own.",
        "price / 3600 / (mfu * machine.peak_flops / model.flops_per_token(sequence))",
    )),
    Exercise(planner.scaling_curve, check_scaling_curve, hints=(
        "What of the plan changes with the number of GPUs, and what of the rest must follow?",
        "dp = GPUs / (tp x pp x cp). Weak: micro_batches stay. Strong: plan.batch / (dp * "
        "micro_batch) of them.",
        "each = replace(plan, dp=dp, micro_batches=pieces); speed = step_time(model, each, "
        "machine).tokens_per_second(each); efficiency = speed / gpus / (first / counts[0])",
    )),
    Exercise(planner.search_layouts, check_search_layouts, hints=(
        "What rules out most plans, and costs least to ask?",
        "Memory first. Of what fits, ask step_time. Begin with layouts(model, machine, gpus, "
        "sequence, batch, tool).",
        "What the library leaves out: with a fast plan that nearly fits, raise `recomputed` from 0 "
        "until it does.",
    )),
)
