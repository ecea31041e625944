"""why: where a step's time goes, and over which link. assumptions: what its seconds take for
granted. likely_range: how far off similar runs are.
"""

import functools
from dataclasses import replace

from ranklab.planner.constants import CONSTANTS
from ranklab.planner.fit import step_ratio
from ranklab.planner.jobs import Unused, is_for_fit, job_of
from ranklab.planner.placement import place
from ranklab.planner.published import read_runs, run_files
from ranklab.planner.score import quantile, score
from ranklab.planner.step import step_time

AXES = {"tensor": "tensor", "context": "context", "expert": "expert", "weights": "shard",
        "pipeline": "pipeline", "data": "weights"}  # part of a Step -> field of its Placement
COMPUTING = ("products", "attention", "other")
HIDDEN = {  # tool: {axis: its messages, and what hides them}
    "megatron": {"data": "gradients (--overlap-grad-reduce, --overlap-param-gather)",
                 "tensor": "tensor messages (--tp-comm-overlap)",
                 "context": "the ring's keys (--cp-comm-type p2p)",
                 "pipeline": "messages between stages (if they are interleaved)"},
    "torchtitan": {"data": "FSDP's weights and gradients (its prefetching)",
                   "context": "the ring's keys"},
    "deepspeed": {"data": "ZeRO's weights and gradients (overlap_comm)"}, "ours": {}}
ENOUGH = 12  # similar runs, for a range of their own
# (median, 90th percentile) of errors if constants are fitted without the row's source: the line
# "all" at the end of `python -m ranklab.projects.planner fit`, of 25 November 2026
LEFT_OUT = {"time": (0.092, 0.228), "memory": (0.023, 0.125)}


def shares(plan, step, machine):
    """[(what, share of the step)], the largest first: "computing", "bubble", "tensor by NVLink"."""
    parts = {"computing": sum(getattr(step, part) for part in COMPUTING)}
    for part in ("recompute", "bubble", "optimizer", "rest"):
        parts[part] = getattr(step, part)
    placement = place(plan, machine)
    for part, group in AXES.items():
        parts[f"{part} by {link(getattr(placement, group), machine)}"] = getattr(step, part)
    return sorted(((name, seconds / step.total) for name, seconds in parts.items() if seconds),
                  key=lambda each: -each[1])


def link(span, machine):
    """The slowest link that a group with this Span crosses."""
    if span.island < span.ranks:
        return "links of islands"
    if span.node < span.ranks:
        return "network"
    return "NVLink" if machine.link > 100e9 else "PCIe"


def why(plan, step, machine, most=3):
    """Where most of the step goes, in words: "computing 74%, bubble 9%, tensor by NVLink 7%"."""
    return ", ".join(f"{name} {share:.0%}"
                     for name, share in shares(plan, step, machine)[:most] if share >= 0.005)


def assumptions(model, plan, machine):
    """Return [(what the seconds of a step take for granted, the seconds without it)].

    Messages beside computing, of the axes that have more than one rank; attention's kernels for
    H100 and later; and both together, if there are two or more.
    """
    ranks = {"data": plan.copies, "tensor": plan.tp, "context": plan.cp, "pipeline": plan.pp}
    shown = [axis for axis in plan.hides if ranks.get(axis, 1) > 1 and axis in HIDDEN[plan.tool]]
    rows = [(f"{HIDDEN[plan.tool][axis]} hidden",
             {"hides": tuple(each for each in plan.hides if each != axis)}) for axis in shown]
    if plan.attention == "tuned":
        rows.append(("attention by cuDNN or FlashAttention 3", {"attention": "flash"}))
    if len(rows) > 1:
        without = "flash" if plan.attention == "tuned" else plan.attention
        rows.append(("all of these", {"hides": (), "attention": without}))
    return [(what, step_time(model, replace(plan, **change), machine).total)
            for what, change in rows]


# --- how far off ----------------------------------------------------------------------------------

def likely_range(plan, machine):
    """(low, high, a sentence): published by predicted step time, the 10th and 90th percentile of
    the most similar published runs: this tool on this kind of GPU, or on any GPU, or all runs.
    """
    family = machine.accelerator.partition("-")[0]
    every = residuals()
    of_tool = [each for each in every if each[0] == plan.tool]
    for found, words in (([each for each in of_tool if each[1] == family],
                          f"{plan.tool} on {family}"), (of_tool, f"{plan.tool}, on any GPU"),
                         (every, "of all tools, on any GPU")):
        if len(found) >= ENOUGH:
            low, high = (quantile([each[2] for each in found], part) for part in (0.1, 0.9))
            side = ": most were slower" if low > 1 else ": most were faster" if high < 1 else ""
            return low, high, (
                f"80% of {len(found)} published runs ({words}) took {low:.2f} to {high:.2f} times "
                f"the predicted time{side}; {sum(each[3] for each in found)} were used in the fit, "
                f"{sum(each[4] for each in found)} are of dense models in bf16")


@functools.cache
def median_errors():
    """(of step times, of memory) of all published runs, as a part of what was measured."""
    found = score([run for path in run_files() for run in read_runs(path)])["all"]
    return quantile(found.times, 0.5), quantile(found.memory, 0.5)


@functools.cache
def residuals():
    """[(tool, kind of GPU, published by predicted step time, whether used in the fit, whether
    the model is dense and its products in bf16)].
    """
    found = []
    for run in (run for path in run_files() for run in read_runs(path)):
        try:
            job = job_of(run)
        except Unused:
            continue
        if job.seconds:
            found.append((job.plan.tool, job.machine.accelerator.partition("-")[0],
                          1 / step_ratio(job, CONSTANTS), is_for_fit(job.row_id),
                          not job.model.experts and job.plan.precision == "bf16"))
    return found
