"""The figures of the deck 13_planner.md."""
from dataclasses import replace

from ranklab.planner import Plan, expert_traffic, find_node, scaling_curve, step_time
from ranklab.planner.catalog import MODELS
from ranklab.planner.fp8 import matmul_share, published_pairs
from ranklab.planner.space import usual
from ranklab.plots import planner as plots
from ranklab.projects import planner as project

_MODEL, _NODE = MODELS["llama-70b"], find_node("h100-dgx")
_PLAN = Plan(dp=16, tp=4, pp=4, sequence=8192, micro_batches=64, zero=1, sequence_parallel=True)


def steps():
    """The four plans of the lab: a step of 1,024 sequences on 256 GPUs."""
    plans = {"16 x 4 x 4": _PLAN,
             "16 x 4 x 4, 5 virtual": replace(_PLAN, virtual=5, schedule="interleaved"),
             "4 x 8 x 8": replace(_PLAN, dp=4, tp=8, pp=8, micro_batches=256),
             "256, FSDP, recompute": Plan(dp=256, sequence=8192, micro_batches=4, zero=3,
                                          recompute="full", tool="torchtitan")}
    found = {name: step_time(_MODEL, plan, _NODE) for name, plan in plans.items()}
    return plots.steps(found, title=""), 8.2, 3.0


def published():
    return plots.published(project.predicted(), title=""), 6.6, 3.5


def scaling():
    small = replace(_PLAN, dp=2, micro_batches=256)
    counts = [32 * 2**n for n in range(8)]
    return plots.scaling(
        {f"the batch {what}": scaling_curve(_MODEL, small, _NODE, counts, weak=weak)
         for what, weak in (("grows", True), ("stays", False))}, title=""), 6.6, 2.5


def fp8():
    gains = [(matmul_share(pair.bf16.model, pair.bf16.plan, pair.bf16.machine), pair.speedup,
              pair.bf16.name) for pair in published_pairs()]
    return plots.fp8(gains, _NODE.rate("fp8") / _NODE.rate("bf16"), title=""), 6.6, 3.2


def domains():
    rack = find_node("gb200-nvl72")
    wide = Plan(dp=64, pp=4, ep=64, virtual=4, schedule="interleaved", zero=1, sequence=4096,
                micro_batches=64, **usual("megatron", rack))
    return plots.domains({f"NVLink joins {domain}": [
        (ep, expert_traffic(MODELS["deepseek-v3"], replace(wide, ep=ep), rack, domain).seconds)
        for ep in (2, 4, 8, 16, 32, 64)] for domain in (8, 64)}, title=""), 6.6, 2.6
