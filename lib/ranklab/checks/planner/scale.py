"""The check of scaling_curve."""

from dataclasses import replace
from functools import partial

from ranklab.checks.beside import expect, refused
from ranklab.checks.trial import called_with, explain, is_near
from ranklab.planner.catalog import MODELS, find_node
from ranklab.planner.plan import Plan
from ranklab.planner.step import step_time


def curve(model, plan, machine, counts, weak, slip=""):
    """What scaling_curve returns; or what this slip gets."""
    found, whole = [], plan.tp * plan.pp * (1 if slip == "cp forgotten" else plan.cp)
    for gpus in counts:
        dp = gpus // whole
        pieces = plan.micro_batches if weak != (slip == "weak and strong exchanged") else (
            plan.batch // (dp * plan.micro_batch))
        pieces = plan.batch // dp if slip == "the micro-batch forgotten" and not weak else pieces
        each = replace(plan, dp=dp, micro_batches=max(1, pieces))
        seconds = step_time(model, each, machine).total
        tokens = (plan if slip == "the tokens of the first batch" else each).batch * plan.sequence
        tokens /= plan.sequence if slip == "sequences/s" else 1
        found.append((gpus, tokens / seconds / (gpus if slip == "tokens/s of a GPU" else 1)))
    first = step_time(model, plan, machine).tokens_per_second(plan) / plan.gpus
    first = first if slip == "beside the plan itself" else found[0][1] / counts[0]
    first = found[0][1] if slip == "speed-up" else first
    return [(gpus, speed, speed / (1 if slip == "speed-up" else gpus) / first)
            for gpus, speed in found]


SLIPS = {
    "weak and strong exchanged": "With weak each pipeline keeps its micro-batches. Otherwise the "
                                 "batch stays.",
    "the micro-batch forgotten": "A micro-batch has plan.micro_batch sequences, so there are batch "
                                 "/ (dp * micro_batch) of them.",
    "the tokens of the first batch": "With weak scaling a step has more tokens: count those of "
                                     "the new plan.",
    "cp forgotten": "Context ranks are GPUs, too: tp x pp x cp of them share a sequence.",
    "tokens/s of a GPU": "The second number counts all GPUs together.",
    "sequences/s": "Count tokens: a sequence has plan.sequence of them.",
    "speed-up": "Efficiency is for one GPU: divide by the GPUs, too.",
    "beside the plan itself": "Compare with the first of `counts`, which may be another number.",
}


def check_scaling_curve(scaling_curve):
    plan = Plan(dp=2, tp=8, pp=2, sequence=4096, micro_batch=4, micro_batches=32, zero=1,
                sequence_parallel=True)
    for name, each, counts in (
            ("llama-8b", plan, (32, 64, 256, 1024)), ("llama-8b", plan, (16, 512)),
            ("gpt2-xl", Plan(dp=8, micro_batches=4, tool="torchtitan", zero=3), (8, 24, 32)),
            ("mixtral-8x7b", replace(plan, dp=8, tp=2, ep=8), (32, 128)),
            ("llama-8b", Plan(dp=16, shard=8, micro_batches=8, tool="torchtitan", zero=3),
             (16, 64)),
            ("llama-70b", replace(plan, cp=2, sequence=32768, tp=4, outermost="data"), (64, 32)),
            ("llama-8b", replace(plan, recompute="full", recomputed=0.5, precision="fp8"),
             (32, 64)),
            ("llama2-7b", Plan(dp=8, micro_batches=8, zero=2, offload=True, recompute="full",
                               attention="tuned", hides=(), tool="deepspeed"), (8, 16))):
        for weak in (True,) if 24 in counts else (False, True):
            _curve(f"{name}, {each.words()}, {'weak' if weak else 'strong'}", scaling_curve,
                   (MODELS[name], each, find_node("h100-dgx"), counts), weak)
    yield "right if the batch stays and if it grows, from any first number of GPUs"
    for said, counts, weak in (("72 GPUs, tp x pp = 16", (64, 72), False), ("8 GPUs", (8,), True),
                               ("72 GPUs, tp x pp = 16, weak", (64, 72), True),
                               ("48 GPUs: 3 data ranks, 256 sequences", (48,), False),
                               ("2,048 GPUs: 128 data ranks, 64 micro-batches", (2048,), False)):
        refused(said, partial(scaling_curve, MODELS["llama-8b"], plan, find_node("h100-dgx"),
                              counts, weak=weak))()
    yield "GPUs or data ranks that do not divide are a ValueError"


def _curve(where, scaling_curve, args, weak):
    with called_with(f"{where}, counts={args[-1]}"):
        got = scaling_curve(*args, weak=weak)
    wanted = curve(*args, weak)
    expect(isinstance(got, list) and [len(each) for each in got] == [3] * len(wanted),
           f"{where}: {got!r:.60}", "A list of (GPUs, tokens/s, efficiency) is needed.")
    for place, (mine, right) in enumerate(zip(got, wanted)):
        for index, what in enumerate(("GPUs", "tokens/s", "efficiency")):
            if is_near(float(mine[index]), float(right[index])):
                continue
            slips = {name: (float(curve(*args, weak, name)[place][index]), advice)
                     for name, advice in SLIPS.items()}
            explain(f"{where}: at {right[0]} GPUs {what}", float(mine[index]),
                    float(right[index]), slips)
