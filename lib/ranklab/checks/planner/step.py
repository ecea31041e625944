"""The check of step_time: each part of a Step, for many kinds of plans."""

from dataclasses import replace
from functools import partial

from ranklab.checks.planner.parts import each_is_right
from ranklab.planner.catalog import MODELS, find_node
from ranklab.planner.constants import CONSTANTS
from ranklab.planner.plan import Plan
from ranklab.planner.step import (
    Step, bubble_part, head_seconds, layer_seconds, sent_seconds, update_seconds,
)

OTHER = replace(CONSTANTS, step_seconds=0.1, product=0.6, product_hopper=0.6, overlap=1.5,
                link_share=0.5)
PIPED = Plan(dp=8, tp=4, pp=8, sequence=4096, micro_batches=24, zero=1, sequence_parallel=True)
CASES = {
    "one GPU": ("llama-8b", Plan(micro_batches=4), CONSTANTS),
    "16 data ranks": ("llama-8b", Plan(dp=16, micro_batches=2, zero=1), OTHER),
    "8 stages": ("llama-70b", PIPED, OTHER),
    "8 stages, hidden messages": ("llama-70b", replace(PIPED, hides=("data", "pipeline")), OTHER),
    "one micro-batch": ("llama-70b", replace(PIPED, micro_batches=1), CONSTANTS),
    "virtual stages": ("llama-70b", replace(PIPED, virtual=5, schedule="interleaved"), OTHER),
    "7 stages of 80 layers": ("llama-70b", replace(PIPED, pp=7), OTHER),
    "a large head": ("bloom-176b", replace(PIPED, pp=5, recompute="full"), CONSTANTS),
    "zero bubble": ("llama-70b", replace(PIPED, schedule="zb-h1"), OTHER),
    "FSDP": ("llama-8b", Plan(dp=64, micro_batches=2, zero=3, tool="torchtitan"), OTHER),
    "context ranks": ("llama-70b", Plan(dp=4, cp=4, tp=8, sequence=65536, zero=1), CONSTANTS),
    "61 layers, experts": ("deepseek-v3", Plan(dp=32, ep=16, pp=2, micro_batches=8, zero=1), OTHER),
}
SLIPS = {
    "one GPU does all stages' work": "pp stages share the layers: divide by plan.pp.",
    "the head on every stage": "Only one stage has the head, so on average a GPU has 1/pp of it.",
    "one micro-batch": "A step has plan.micro_batches micro-batches.",
    "the head forgotten": "head_seconds has products and other, on top of the layers'.",
    "the head in no part": "head_seconds has products and other, on top of the layers'.",
    "the bubble as a part of the busy time": "bubble_part is a part of the whole time, the "
                                             "bubble included: busy * part / (1 - part).",
    "a bubble without messages": "The time that stages wait for messages belongs to the "
                                 "pipeline's time, too: (busy + sent) * part / (1 - part).",
    "no bubble": "Add the schedule's bubble_part, and the waiting for the fullest stage.",
    "no waiting for the fullest stage": "The average is not enough: all wait for the stage with "
                                        "the most layers or with the head.",
    "waiting of one micro-batch": "They wait for the fullest stage in each of M micro-batches.",
    "the fullest stage without the head": "The last stage has the head on top of its layers.",
    "the head on the stage with most layers": "The last stage has the head; another may have the "
                                              "most layers.",
    "the schedule's part of the fullest stage": "It is a part of (busy + sent + bubble) of the "
                                                "average; the waiting comes on top.",
    "messages of one micro-batch": "sent_seconds counts one micro-batch.",
    "messages beside all micro-batches": "`beside` is the busy time of one micro-batch.",
    "an update for each micro-batch": "Gradients travel, and the optimizer runs, once a step.",
    "an update beside all micro-batches": "`beside` is the busy time of one micro-batch.",
    "no rest": "rest is constants.step_seconds.",
    "the constants of the library": "Pass `constants` on to each function.",
}


def right(model, plan, machine, c, slip=""):
    """The right Step; or what this slip gets."""
    c = CONSTANTS if slip == "the constants of the library" else c
    M = 1 if slip == "one micro-batch" else plan.micro_batches
    P = 1 if slip == "one GPU does all stages' work" else plan.pp
    layers, head = layer_seconds(model, plan, machine, c), head_seconds(model, plan, machine, c)
    head = {} if slip == "the head forgotten" else head
    times = {"the head on every stage": plan.pp, "the head in no part": 0}.get(slip, 1)
    parts = {name: M / P * (layers[name] + times * head.get(name, 0)) for name in layers}
    busy, each = sum(parts.values()), sum(layers.values()) / model.layers
    beside = busy if slip == "messages beside all micro-batches" else busy / M
    sent = sent_seconds(model, plan, machine, beside, c)
    sent *= 1 if slip == "messages of one micro-batch" else M
    ends = sum(head.values()) * (slip != "the fullest stage without the head")
    stages = plan.stages(model.layers)
    fullest = max(n * each + ends * (rank == plan.pp - 1) for rank, n in enumerate(stages))
    if slip == "the head on the stage with most layers":
        fullest = max(stages) * each + ends
    waits = max(0.0, M * fullest - busy) * (slip != "no waiting for the fullest stage")
    waits /= M if slip == "waiting of one micro-batch" else 1
    part = bubble_part(model, plan, machine, c)
    of = busy + sent * (slip != "a bubble without messages")
    of += waits * (slip == "the schedule's part of the fullest stage")
    bubble = of * part / (1 if slip == "the bubble as a part of the busy time" else 1 - part)
    bubble = 0.0 if slip == "no bubble" else bubble + waits
    beside = busy if slip == "an update beside all micro-batches" else busy / M
    data, optimizer = update_seconds(model, plan, machine, beside, c)
    if slip == "an update for each micro-batch":
        data, optimizer = M * data, M * optimizer
    rest = c.step_seconds * (slip != "no rest")
    return Step(**parts, pipeline=sent, bubble=bubble, data=data, optimizer=optimizer, rest=rest)


def check_step_time(step_time):
    cases = {}
    for node in ("h100-dgx", "a100-dgx", "gb200-nvl72"):
        for name, (model, plan, c) in CASES.items():
            asked = MODELS[model], plan, find_node(node), c
            cases[f"{name} ({plan.words()}) on {node}"] = (partial(step_time, *asked),
                                                           partial(right, *asked))
    for number, _ in enumerate(each_is_right(cases, SLIPS, "in seconds")):
        if number == 0:
            yield "right on one GPU"
        if number == len(CASES) - 1:
            yield "right with stages, virtual stages, uneven ones, context ranks, FSDP, experts"
    yield "right on other machines; parts add up to the total"
