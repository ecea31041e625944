"""step_time: each part of a Step, for many kinds of plans."""

from dataclasses import replace
from typing import NamedTuple

from ranklab.checks.planner.parts import in_seconds, parts_of
from ranklab.checks.prover import Proof, Slip, Stage
from ranklab.planner.catalog import MODELS, find_node
from ranklab.planner.constants import CONSTANTS, Constants
from ranklab.planner.plan import Plan
from ranklab.planner.step import (
    Step, bubble_part, head_seconds, layer_seconds, sent_seconds, step_time, update_seconds,
)

OTHER = replace(CONSTANTS, step_seconds=0.1, product=0.6, product_hopper=0.6, overlap=1.5,
                link_share=0.5)
PIPED = Plan(dp=8, tp=4, pp=8, sequence=4096, micro_batches=24, zero=1, sequence_parallel=True)


class Case(NamedTuple):
    """A plan for a model on some nodes."""

    name: str
    model: str
    plan: Plan
    constants: Constants
    node: str = "h100-dgx"

    def __str__(self):
        return f"{self.name} ({self.plan.words()}) on {self.node}"


PLANS = (
    Case("one GPU", "llama-8b", Plan(micro_batches=4), CONSTANTS),
    Case("7 stages of 80 layers", "llama-70b", replace(PIPED, pp=7), OTHER),
    Case("16 data ranks", "llama-8b", Plan(dp=16, micro_batches=2, zero=1), OTHER),
    Case("8 stages", "llama-70b", PIPED, OTHER),
    Case("8 stages, hidden messages", "llama-70b", replace(PIPED, hides=("data", "pipeline")),
         OTHER),
    Case("one micro-batch", "llama-70b", replace(PIPED, micro_batches=1), CONSTANTS),
    Case("virtual stages", "llama-70b", replace(PIPED, virtual=5, schedule="interleaved"), OTHER),
    Case("a large head", "bloom-176b", replace(PIPED, pp=5, recompute="full"), CONSTANTS),
    Case("zero bubble", "llama-70b", replace(PIPED, schedule="zb-h1"), OTHER),
    Case("FSDP", "llama-8b", Plan(dp=64, micro_batches=2, zero=3, tool="torchtitan"), OTHER),
    Case("context ranks", "llama-70b", Plan(dp=4, cp=4, tp=8, sequence=65536, zero=1), CONSTANTS),
    Case("61 layers, experts", "deepseek-v3", Plan(dp=32, ep=16, pp=2, micro_batches=8, zero=1),
         OTHER),
)
ELSEWHERE = tuple(case._replace(node=node) for node in ("a100-dgx", "gb200-nvl72")
                  for case in PLANS)


def _see(fn, case):
    step = fn(MODELS[case.model], case.plan, find_node(case.node), case.constants)
    yield parts_of(step, Step, in_seconds)


def of_each_stage(model, plan, machine, constants=CONSTANTS):
    """Make a list of the seconds of each stage for one micro-batch; the rest follows from its mean
    and its largest.
    """
    M = plan.micro_batches
    layers = layer_seconds(model, plan, machine, constants)
    head = head_seconds(model, plan, machine, constants)
    stages = [n * sum(layers.values()) / model.layers for n in plan.stages(model.layers)]
    stages[-1] += sum(head.values())
    mean = sum(stages) / plan.pp
    sent = sent_seconds(model, plan, machine, mean, constants)
    idle = 1 / (1 - bubble_part(model, plan, machine, constants)) - 1  # of the rest
    data, optimizer = update_seconds(model, plan, machine, mean, constants)
    parts = {name: M * (seconds + head.get(name, 0)) / plan.pp for name, seconds in layers.items()}
    return Step(**parts, pipeline=M * sent, bubble=M * (idle * (mean + sent) + max(stages) - mean),
                data=data, optimizer=optimizer, rest=constants.step_seconds)


def mfu_of_a_half(model, plan, machine, constants=CONSTANTS):
    flops = model.flops_per_token(plan.sequence) * plan.batch * plan.sequence
    return Step(flops / plan.gpus / machine.peak_flops / 0.5, *12 * [0.0])


def the_total_alone(model, plan, machine, constants=CONSTANTS):
    parts = layer_seconds(model, plan, machine, constants)
    return plan.micro_batches / plan.pp * sum(parts.values())


def a_dictionary(model, plan, machine, constants=CONSTANTS):
    return layer_seconds(model, plan, machine, constants)


COMPUTED = "M / P * (layers[part] + head.get(part, 0))"
SENT = "M * sent_seconds(model, plan, machine, busy / M, c)"
BUBBLE = "(busy + sent) * part / (1 - part)"
WAITS = "max(0.0, M * fullest - busy)"
FULLEST = "n * layer + (rank == P - 1) * ends"
UPDATE = "update_seconds(model, plan, machine, busy / M, c)"
ENDS = "busy, ends = sum(parts.values()), sum(head.values())"
COMPUTING = (f"{ENDS}\n    work = sum(parts[part] for part in ('products', 'attention', 'other', "
             "'recompute'))")
HEAD = ("head_seconds returns products and other. Add them to the layers' products and other, and "
        "to no other part.")
STAGES = ("Each stage has its own layers, plan.stages(model.layers), and the last one also has the "
          "head: the fullest stage has the largest sum.")
OF_SCHEDULE = "bubble_part gives the schedule's bubble: neither leave it out nor rewrite it."
ON = "Pass `constants` on to each function that takes them."
STEP = Proof(
    step_time,
    Stage("right on one GPU", _see, PLANS[:1], oracle=of_each_stage),
    Stage("right with stages, virtual stages, uneven ones, context ranks, FSDP, experts", _see,
          PLANS[1:], oracle=of_each_stage),
    Stage("right on other machines; parts add up to the total", _see, ELSEWHERE,
          oracle=of_each_stage),
    mistakes=(
        Slip("pp stages share the layers: divide by plan.pp.", (COMPUTED, COMPUTED.replace(
            "M / P *", "M *"))),
        Slip("A step has plan.micro_batches micro-batches: this is the time of only one.",
             (COMPUTED, COMPUTED.replace("M / P", "1 / P"))),
        Slip("M is the number of micro-batches in one pipeline, whatever the number of data ranks.",
             ("plan.micro_batches, plan.pp", "plan.micro_batches * plan.dp, plan.pp"),
             ("plan.micro_batches, plan.pp", "plan.batch, plan.pp")),
        Slip(HEAD, (COMPUTED, "M / P * layers[part]"),
             (", head_seconds(model, plan, machine, c)", ", {}"),
             ("head.get(part, 0)", "sum(head.values())")),
        Slip("Only one stage has the head, so the average GPU has 1/pp of it.",
             (COMPUTED, "M / P * layers[part] + M * head.get(part, 0)")),
        Slip("layer_seconds already covers all layers: do not multiply by their number.",
             (COMPUTED, "M / P * (model.layers * layers[part] + head.get(part, 0))")),
        Slip("bubble_part is a fraction of the whole time, including the bubble. As a fraction of "
             "the rest, it is part / (1 - part).", (BUBBLE, "(busy + sent) * part")),
        Slip("The pipeline's time includes the messages between stages: (busy + sent) * part / (1 "
             "- part).", (BUBBLE, "busy * part / (1 - part)")),
        Slip(OF_SCHEDULE, (f"{BUBBLE} + ", ""),
             ("bubble_part(model, plan, machine, c)", "(P - 1) / (M + P - 1)"),
             ("bubble_part(model, plan, machine, c)",
              "(P - 1) / (plan.virtual * M + P - 1)")),
        Slip("That is only part of the bubble: all stages also wait for the fullest one, which has "
             "the most layers or the head.", (f"{BUBBLE} + {WAITS}", BUBBLE)),
        Slip("The bubble is missing: add the schedule's bubble_part, and the wait for the fullest "
             "stage.",
             (f"bubble = {BUBBLE} + {WAITS}", "bubble = 0.0")),
        Slip("The schedule's bubble is a fraction of the average, (busy + sent + bubble); the wait "
             "for the fullest stage is added separately.",
             (f"{BUBBLE} + {WAITS}", "(M * fullest + sent) * part / (1 - part) + M * fullest - "
              "busy")),
        Slip("Stages wait for the fullest one in each of M micro-batches.",
             (WAITS, "max(0.0, fullest - busy / M)")),
        Slip(STAGES, (FULLEST, "n * layer"), (FULLEST, "n * layer + ends"),
             (FULLEST, "n * layer + (rank == 0) * ends"),
             ("plan.stages(model.layers)", "[model.layers / P] * P"),
             ("plan.stages(model.layers)", "[-(-model.layers // P)] * P")),
        Slip("sent_seconds counts one micro-batch: a step sends M of them.",
             (SENT, SENT.removeprefix("M * ")), ("pipeline=sent", "pipeline=sent / M")),
        Slip("Add the messages that stages send to each other: sent_seconds.", (SENT, "0.0")),
        Slip("Pass sent_seconds the busy time of one micro-batch as `beside`.",
             (SENT, SENT.replace("busy / M", "busy")), (SENT, SENT.replace("busy / M", "0.0"))),
        Slip("Pass update_seconds the busy time of one micro-batch as `beside`.",
             (UPDATE, UPDATE.replace("busy / M", "busy")),
             (UPDATE, UPDATE.replace("busy / M", "0.0"))),
        Slip("`beside` is the busy time of a micro-batch including its messages, not just the "
             "computing.",
             *((ENDS, COMPUTING, *edits) for edits in (
                 (SENT, SENT.replace("busy", "work")), (UPDATE, UPDATE.replace("busy", "work")),
                 (SENT, SENT.replace("busy", "work"), UPDATE, UPDATE.replace("busy", "work"))))),
        Slip("Gradients are sent, and the optimizer runs, only once per step.",
             (f"= {UPDATE}", f"= (M * each for each in {UPDATE})")),
        Slip("update_seconds returns (data, optimizer), in this order.",
             (f"data, optimizer = {UPDATE}", f"optimizer, data = {UPDATE}")),
        Slip("All GPUs update at the same time: do not divide update_seconds by the number of "
             "stages.",
             (f"= {UPDATE}", f"= (each / P for each in {UPDATE})")),
        Slip("rest is constants.step_seconds, once a step.",
             ("=c.step_seconds", "=0.0"), ("=c.step_seconds", "=M * c.step_seconds")),
        Slip(ON, ("c, M, P = constants,", "c, M, P = CONSTANTS,"),
             ("layer_seconds(model, plan, machine, c)", "layer_seconds(model, plan, machine)"),
             ("head_seconds(model, plan, machine, c)", "head_seconds(model, plan, machine)"),
             (SENT, SENT.replace(", c)", ")")), (UPDATE, UPDATE.replace(", c)", ")"))),
        Slip("This is the time of the FLOPs at a guessed MFU, but the MFU is what step_time should "
             "predict: add up the parts.", mfu_of_a_half),
        Slip("Return the Step, with all its parts.", the_total_alone, a_dictionary),
    ), hints=(
        "What share of the layers does each of pp GPUs compute, and for how many micro-batches?",
        "busy is M / P times all parts of the layers and the head. The bubble is given as a "
        "fraction of the whole time. As a fraction of the rest, it is part / (1 - part).",
        "fullest = max(n * layer + (rank == P - 1) * ends for rank, n in enumerate(plan.stages("
        "model.layers))); bubble = (busy + sent) * part / (1 - part) + max(0, M * fullest - busy)",
    ))
