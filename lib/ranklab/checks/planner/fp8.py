"""fp8_speedup: compared with a sum over the layers' own products."""

from dataclasses import replace
from typing import NamedTuple

from ranklab.checks.prover import Proof, Slip, Stage
from ranklab.planner.catalog import MODELS, find_node
from ranklab.planner.fp8 import fp8_speedup
from ranklab.planner.plan import Plan
from ranklab.planner.step import head_seconds, layer_seconds, step_time

SHARDED = Plan(dp=8, sequence=8192, micro_batches=2, zero=3, tool="torchtitan")
PIPED = Plan(dp=2, tp=4, pp=4, sequence=8192, micro_batches=8, zero=1, sequence_parallel=True)


class Case(NamedTuple):
    """A model, a plan and a node."""

    model: str
    plan: Plan
    node: str = "h100-dgx"

    def __str__(self):
        precision = f", in {self.plan.precision}" * (self.plan.precision != "bf16")
        return f"{self.model} on {self.node}, {self.plan.words()}{precision}"


def _see(fn, case):
    times = fn(MODELS[case.model], case.plan, find_node(case.node))
    yield {"how many times as fast": times if times is None else float(times)}


def by_layers(model, plan, machine):
    """Add up a step again, with the products of the layers alone at FP8's rate."""
    if plan.precision != "bf16" or machine.fp8 == 0:
        raise ValueError("not from bf16 to FP8")
    step, part = step_time(model, plan, machine), plan.micro_batches / plan.pp
    again = plan.rerun_share / 3
    layers = part * layer_seconds(model, plan, machine)["products"] * (1 + again)
    head = part * sum(head_seconds(model, plan, machine).values())
    once = step.pipeline + step.data + step.optimizer + step.rest
    span = step.total - once
    busy = span - step.bubble
    rest = busy - layers - head
    faster = layers * machine.bf16 / machine.fp8 + rest + head
    return step.total / (faster / busy * span + once)


CASES = (
    Case("llama-8b", SHARDED),
    Case("llama-70b", PIPED),
    Case("llama-70b", replace(PIPED, recompute="full", micro_batches=4)),
    Case("llama-8b", replace(SHARDED, recompute="full", recomputed=0.5, sequence=32768)),
    Case("mixtral-8x7b", replace(PIPED, dp=8, tp=2, ep=8), "b200-dgx"),
    Case("llama-8b", replace(PIPED, tp=1, sequence_parallel=False, recompute="selective")),
    Case("deepseek-v3", Plan(dp=64, pp=4, ep=64, sequence=4096, micro_batches=64, zero=1),
         "gb200-nvl72"),
)
REFUSED = (Case("llama-8b", SHARDED, "a100-dgx"),
           Case("llama-8b", replace(SHARDED, precision="fp8")),
           Case("llama-8b", replace(SHARDED, precision="mxfp8"), "b200-dgx"))
HEAD = "(step.products - head)"
PART = "plan.micro_batches / plan.pp * head_seconds"
AGAIN = " * (1 + plan.rerun_share / 3)"
RATE = 'machine.rate("bf16") / machine.rate("fp8")'
MATMULS = f"{HEAD}{AGAIN}"
SAVED = f"saved = matmuls * (1 - {RATE})"
RETURN = "step.total / (step.total - saved * (1 + step.bubble / busy))"
BUSY = ("busy = step.total - step.pipeline - step.bubble - step.data - step.optimizer - "
        "step.rest")
FP8_SPEEDUP = Proof(
    fp8_speedup,
    Stage("right for dense models and experts, with a pipeline, and if blocks run again", _see,
          CASES, oracle=by_layers),
    Stage("a plan that is not in bf16, or a GPU without FP8, is a ValueError", _see, REFUSED,
          oracle=by_layers),
    mistakes=(
        Slip("The head's products stay in bf16: subtract them from Step.products.",
             (HEAD, "step.products")),
        Slip("head_seconds is for one micro-batch: multiply it by plan.micro_batches.",
             (PART, "1 / plan.pp * head_seconds")),
        Slip("Only the last of plan.pp stages has the head, and a Step is about the average "
             "stage: divide by plan.pp.", (PART, "plan.micro_batches * head_seconds")),
        Slip("head_seconds is for one micro-batch: multiply it by plan.micro_batches. Only the "
             "last of plan.pp stages has the head: divide by plan.pp.", (PART, "head_seconds")),
        Slip("The head's softmax and loss are not in Step.products: subtract only its products.",
             ('head_seconds(model, plan, machine)["products"]',
              "sum(head_seconds(model, plan, machine).values())")),
        Slip("The peak doubles, but measured products do not reach it: divide machine.rate's "
             "numbers.", (RATE, 'machine.peak() / machine.peak("fp8")'), (RATE, "1 / 2")),
        Slip("The fraction is upside down. In FP8 the products take bf16's rate / FP8's rate of "
             "their time, which is less than 1.",
             (SAVED, 'saved = matmuls * (1 - machine.rate("fp8") / machine.rate("bf16"))')),
        Slip("The products take less time, but not none.", (SAVED, "saved = matmuls")),
        Slip("You subtract the seconds that the products still take in FP8. Subtract what they "
             "save: 1 - bf16's rate / FP8's.",
             (SAVED, f"saved = matmuls * {RATE}")),
        Slip("Not the whole step runs at FP8's rate: only the products of the layers do.",
             (RETURN, 'machine.rate("fp8") / machine.rate("bf16")')),
        Slip("Attention's core stays in bf16: only Step.products has the matrix products.",
             (HEAD, "(step.products + step.attention - head)")),
        Slip("The blocks that run again have products too, in Step.recompute: a third of the "
             "layers' products, for plan.rerun_share of the layers.", (AGAIN, "")),
        Slip("Step.recompute also has attention and memory-bound work, which FP8 does not speed "
             "up: count the products alone.",
             (MATMULS, f"{HEAD} + step.recompute")),
        Slip("Backward has twice as many products as forward, so a forward is a third of the "
             "layers' products.", (AGAIN, " * (1 + plan.rerun_share / 2)"),
             (AGAIN, " * (1 + plan.rerun_share)")),
        Slip("plan.rerun_share says how many of the layers run again, which may be some or none.",
             (AGAIN, " * (1 + 1 / 3)"), (AGAIN, ' * (1 + (plan.recompute == "full") / 3)')),
        Slip("The other stages wait for these products: the bubble shrinks as the busy seconds do.",
             (" * (1 + step.bubble / busy)", "")),
        Slip("The bubble keeps its ratio to the busy seconds, not to the whole step.",
             ("step.bubble / busy", "step.bubble / step.total")),
        Slip("Messages between stages, gradients, the optimizer and the rest are not busy seconds: "
             "the bubble does not shrink with them.",
             (BUSY, "busy = step.total - step.bubble")),
        Slip("Exposed messages of tensor, context and expert ranks and gathered weights count as "
             "busy seconds: the bubble is in addition to them.",
             (BUSY, "busy = step.products + step.attention + step.other + step.recompute")),
        Slip("That is the new time divided by the old. Return how many times as fast: turn it "
             "round.", (RETURN, "(step.total - saved * (1 + step.bubble / busy)) / step.total")),
        Slip("These are the seconds with FP8. Divide the old seconds by them.",
             (RETURN, "step.total - saved * (1 + step.bubble / busy)")),
        Slip("These are the seconds that you save. Return how many times as fast a step is.",
             (RETURN, "saved * (1 + step.bubble / busy)")),
        Slip("That is the planner's own prediction, with rates fitted to published runs. Use "
             "Amdahl's law: everything but the products and the bubble keeps its seconds.",
             (RETURN, "step.total / step_time(model, replace(plan, precision='fp8'), "
              "machine).total"), replace=replace),
        Slip("Return the number.", (f"return {RETURN}", RETURN)),
        Slip("Without FP8 a GPU has no such rate: refuse a machine whose fp8 is 0.",
             ("if not machine.fp8:", "if False:")),
        Slip('Refuse every plan that is not in bf16, also "mxfp8": its products are already in 8 '
             'bits.',
             ('if plan.precision != "bf16":', "if False:"),
             ('if plan.precision != "bf16":', 'if plan.precision == "fp8":')),
    ), hints=(
        "Which seconds of the step become fewer, and which of Step.products are not among them?",
        "matmuls = (step.products - head) * (1 + plan.rerun_share / 3); of them 1 - bf16's rate / "
        "FP8's is saved, and the same share of the bubble.",
        "step.total / (step.total - saved * (1 + step.bubble / busy))",
    ))
