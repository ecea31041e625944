"""scaling_curve: from any first number of GPUs, with a constant batch and with a growing one."""

from dataclasses import replace
from typing import NamedTuple

from ranklab.checks.planner.parts import number_of
from ranklab.checks.prover import Proof, Slip, Stage
from ranklab.planner.catalog import MODELS, find_node
from ranklab.planner.plan import Plan
from ranklab.planner.scaling import scaling_curve
from ranklab.planner.step import step_time

LIST = "a list of (GPUs, tokens/s, efficiency)"
PIPED = Plan(dp=2, tp=8, pp=2, sequence=4096, micro_batch=4, micro_batches=32, zero=1,
             sequence_parallel=True)


class Case(NamedTuple):
    """A plan on different numbers of GPUs; `why` is told about those that do not divide."""

    model: str
    plan: Plan
    counts: tuple
    weak: bool = False
    why: str = ""

    def __str__(self):
        return (f"{self.model}, {self.plan.words()}, {'weak' if self.weak else 'strong'}, counts="
                f"{self.counts}" + f": {self.why}" * bool(self.why))


def _see(fn, case):
    curve = fn(MODELS[case.model], case.plan, find_node("h100-dgx"), case.counts, weak=case.weak)
    is_list = isinstance(curve, list) and [3] * len(case.counts) == [
        len(point) if isinstance(point, tuple | list) and all(
            number_of(number) is not None for number in point) else 0 for point in curve]
    yield {"what it returns": LIST if is_list else curve} | {
        f"{name} at {gpus} GPUs": float(number)
        for gpus, point in zip(case.counts, curve if is_list else ())
        for name, number in zip(("the number of GPUs", "tokens/s", "efficiency"), point)}


def by_throughput(model, plan, machine, counts, weak=False):
    """Divide the tokens of a step by its seconds, and each throughput by the first."""
    points = []
    for gpus in counts:
        dp = gpus / (plan.tp * plan.pp * plan.cp)
        micro_batches = plan.micro_batches if weak else plan.dp * plan.micro_batches / dp
        if min(dp, micro_batches) < 1 or dp % 1 or micro_batches % 1:
            raise ValueError(f"{dp} data ranks with {micro_batches} micro-batches")
        tokens = dp * plan.micro_batch * micro_batches * plan.sequence
        plan_here = replace(plan, dp=int(dp), micro_batches=int(micro_batches))
        points.append((gpus, tokens / step_time(model, plan_here, machine).total))
    of_a_gpu = points[0][1] / points[0][0]
    return [(gpus, speed, speed / (of_a_gpu * gpus)) for gpus, speed in points]


def linear(model, plan, machine, counts, weak=False):
    speed = step_time(model, plan, machine).tokens_per_second(plan) / plan.gpus
    return [(gpus, speed * gpus, 1.0) for gpus in counts]


CASES = tuple(Case(name, plan, counts, weak) for name, plan, counts in (
    ("llama-8b", PIPED, (32, 64, 256, 1024)), ("llama-8b", PIPED, (16, 512)),
    ("gpt2-xl", Plan(dp=8, micro_batches=4, tool="torchtitan", zero=3), (8, 24, 32)),
    ("mixtral-8x7b", replace(PIPED, dp=8, tp=2, ep=8), (32, 128)),
    ("llama-8b", Plan(dp=16, shard=8, micro_batches=8, tool="torchtitan", zero=3), (16, 64)),
    ("llama-70b", replace(PIPED, cp=2, sequence=32768, tp=4, outermost="data"), (64, 32)),
    ("llama2-13b", replace(PIPED, tp=2, outermost="data"), (8, 32)),
    ("llama-8b", replace(PIPED, recompute="full", recomputed=0.5, precision="fp8"), (32, 64)),
    ("llama2-7b", Plan(dp=8, micro_batches=8, zero=2, offload=True, recompute="full",
                       attention="tuned", hides=(), tool="deepspeed"), (8, 16)),
) for weak in ((True,) if 24 in counts else (False, True)))
REFUSED = tuple(Case("llama-8b", PIPED, *each) for each in (
    ((64, 72), False, "tp x pp is 16"), ((8,), True, "tp x pp is 16"),
    ((64, 72), True, "tp x pp is 16"), ((48,), False, "3 data ranks, 256 sequences"),
    ((2048,), False, "128 data ranks, 64 micro-batches")))
WHOLE = "plan.gpus // plan.dp"
PIECES = "(plan.micro_batches, 0) if weak else divmod("
BATCH = "plan.batch, dp * plan.micro_batch)"
MADE = "replace(plan, dp=dp, micro_batches=pieces)"
NEW = ("Plan(dp=dp, tp=plan.tp, pp=plan.pp, cp=plan.cp, sequence=plan.sequence, tool=plan.tool, "
       "micro_batch=plan.micro_batch, micro_batches=pieces)")
SPEED = "step_time(model, each, machine).tokens_per_second(each)"
RATIO = "speed / gpus / (curve[0][1] / counts[0]) if curve else 1.0"
RETURN = "    return curve"
SCALING = Proof(
    scaling_curve,
    Stage("right whether the batch stays or grows, from any initial number of GPUs", _see, CASES,
          oracle=by_throughput),
    Stage("GPUs or data ranks that do not divide are a ValueError", _see, REFUSED,
          oracle=by_throughput),
    mistakes=(
        Slip("With weak=True each pipeline keeps its micro-batches. Otherwise the batch stays the "
             "same, so more pipelines have fewer micro-batches each.",
             (PIECES, PIECES.replace("if weak", "if not weak")),
             (PIECES, PIECES.replace("if weak", "if True")), (MADE, "replace(plan, dp=dp)")),
        Slip("With weak=True each pipeline keeps its micro-batches: only the GPUs must divide "
             "evenly, not the batch.", (PIECES, PIECES.replace("if weak", "if False")),
             ("(plan.micro_batches, 0) if weak",
              "(plan.micro_batches, plan.batch % (dp * plan.micro_batch)) if weak")),
        Slip("A micro-batch has plan.micro_batch sequences, so each pipeline has batch / (dp * "
             "micro_batch) micro-batches.", (BATCH, "plan.batch, dp)")),
        Slip("Divide plan.batch, the batch of all data ranks: plan.micro_batches counts only one "
             "pipeline's micro-batches.",
             (BATCH, "plan.micro_batches, dp)")),
        Slip("Count the tokens of the new plan: its batch can be larger.",
             (f"speed = {SPEED}", f"speed = {SPEED.replace('(each)', '(plan)')}")),
        Slip("Count tokens, not sequences: a sequence has plan.sequence tokens.", (
            SPEED, f"{SPEED} / plan.sequence")),
        Slip("The second number counts all GPUs together.", (SPEED, f"{SPEED} / gpus")),
        Slip("This is the time of a step. Return tokens per second: step.tokens_per_second(each).",
             (SPEED, "step_time(model, each, machine).total")),
        Slip("Everything else in the plan stays the same: replace(plan, dp=..., "
             "micro_batches=...).",
             (MADE, f"{MADE[:-1]}, recompute='none')"), (MADE, f"{MADE[:-1]}, offload=False)"),
             (MADE, f"{MADE[:-1]}, precision='bf16')"),
             (MADE, f"{MADE[:-1]}, sequence_parallel=False)"),
             (MADE, f"{MADE[:-1]}, shard=0)"), (MADE, f"{MADE[:-1]}, hides=('data',))"),
             (MADE, f"{MADE[:-1]}, outermost='pipeline')"), (MADE, f"{MADE[:-1]}, ep=1)"),
             (MADE, f"{MADE[:-1]}, zero=0)"), (MADE, NEW), Plan=Plan),
        Slip("Context ranks are GPUs, too: tp x pp x cp GPUs work on each sequence.",
             (WHOLE, "plan.tp * plan.pp")),
        Slip("Stages are GPUs, too: a replica of the model has tp x pp x cp GPUs.",
             (WHOLE, "plan.tp * plan.cp")),
        Slip("This is the speedup. Efficiency is per GPU: divide by the numbers of GPUs as well.",
             (RATIO, "speed / curve[0][1] if curve else 1.0")),
        Slip("Compare with the first of `counts`, which can differ from the plan's own number of "
             "GPUs.",
             (RATIO, "speed / gpus / (step_time(model, plan, machine).tokens_per_second(plan) / "
              "plan.gpus)")),
        Slip("Compare with the first of `counts`, not with the one before.",
             (RATIO, "speed / gpus / (curve[-1][1] / curve[-1][0]) if curve else 1.0")),
        Slip("An efficiency of 1 is 100%: do not multiply by 100.", (RATIO, f"100 * ({RATIO})")),
        Slip("Efficiency is the speed per GPU now, divided by the speed per GPU at first: invert "
             "the fraction.",
             (RATIO, "curve[0][1] / counts[0] / (speed / gpus) if curve else 1.0")),
        Slip("The first number counts all GPUs, not the data ranks.",
             ("(gpus, speed,", "(dp, speed,")),
        Slip("Return a list of (GPUs, tokens/s, efficiency).",
             (RETURN, "    return dict(zip(counts, curve))"),
             (RETURN, "    return [each[:2] for each in curve]"),
             (RETURN, "    return [each[1] for each in curve]")),
        Slip("If tp x pp x cp does not divide the GPUs, raise a ValueError: no GPU may be left "
             "over.",
             ("if rest or not dp:", "if not dp:"), ("if rest or not dp:", "if False:")),
        Slip("If the data ranks do not divide the batch, raise a ValueError: no sequence may be "
             "left over.", ("if remainder or not pieces:", "if not pieces:"),
             ("if remainder or not pieces:", "if False:")),
        Slip("tp x pp x cp must divide the number of GPUs, but this need not be a multiple of the "
             "plan's.",
             ("divmod(gpus, replica_gpus)", "divmod(gpus, plan.gpus)")),
        Slip("Speed does not grow linearly: call step_time for each number of GPUs.", linear),
    ), hints=(
        "Which field of the plan changes with the number of GPUs, and which other one must follow?",
        "dp = GPUs / (tp x pp x cp). Weak scaling keeps micro_batches. Strong scaling has "
        "plan.batch / (dp * micro_batch) of them.",
        "each = replace(plan, dp=dp, micro_batches=pieces); speed = step_time(model, each, "
        "machine).tokens_per_second(each); efficiency = speed / gpus / (first / counts[0])",
    ))
