"""The check of step_time: each part of a Step, for many kinds of plans."""

import math
from dataclasses import fields, replace

from ranklab.checks.beside import expect
from ranklab.checks.trial import explain, is_near
from ranklab.planner.catalog import MODELS, find_node
from ranklab.planner.constants import CONSTANTS
from ranklab.planner.plan import Plan
from ranklab.planner.step import (
    Step, bubble_part, head_seconds, layer_seconds, sent_seconds, update_seconds,
)

OTHER = replace(CONSTANTS, waiting=0.02, step_seconds=0.1, pipeline_exposed=1.0)
PIPED = Plan(dp=8, tp=4, pp=8, sequence=4096, micro_batches=24, zero=1, sequence_parallel=True)
CASES = {
    "one GPU": ("llama-8b", Plan(micro_batches=4), CONSTANTS),
    "16 data ranks": ("llama-8b", Plan(dp=16, micro_batches=2, zero=1), OTHER),
    "8 stages": ("llama-70b", PIPED, OTHER),
    "one micro-batch": ("llama-70b", replace(PIPED, micro_batches=1), CONSTANTS),
    "virtual stages": ("llama-70b", replace(PIPED, virtual=5, schedule="interleaved"), OTHER),
    "7 stages of 80 layers": ("llama-70b", replace(PIPED, pp=7), OTHER),
    "a large head": ("bloom-176b", replace(PIPED, pp=5, recompute="full"), CONSTANTS),
    "zero bubble": ("llama-70b", replace(PIPED, schedule="zb-h1"), OTHER),
    "FSDP": ("llama-8b", Plan(dp=64, micro_batches=2, zero=3, tool="torchtitan"), OTHER),
    "context ranks": ("llama-70b", Plan(dp=4, cp=4, tp=8, sequence=65536, zero=1), CONSTANTS),
    "experts": ("mixtral-8x7b", Plan(dp=32, ep=8, pp=2, micro_batches=8, zero=1), OTHER),
}
SLIPS = {
    "one GPU does all stages' work": "pp stages share the layers: divide by plan.pp.",
    "the head on every stage": "One of the stages has the head: on average 1/pp of it.",
    "one micro-batch": "A step has plan.micro_batches of them.",
    "the head forgotten": "head_seconds has products and other, on top of the layers'.",
    "the bubble as a part of the busy time": "bubble_part is a part of all time, the bubble "
                                             "included: busy * part / (1 - part).",
    "a bubble without messages": "What stages wait for their messages is in the pipeline's time, "
                                 "too: (busy + sent) * part / (1 - part).",
    "no waiting for the fullest stage": "The average is not enough: all wait for the stage with "
                                        "most layers, or the head.",
    "the fullest stage without the head": "The last stage has the head on top of its layers.",
    "messages of one micro-batch": "sent_seconds is of one micro-batch.",
    "an update for each micro-batch": "Gradients travel, and the optimizer runs, once a step.",
    "an update beside all micro-batches": "`beside` is the busy time of one micro-batch.",
    "doublings of GPUs": "`waiting` counts doublings of nodes: log2 of plan.gpus / machine.node.",
    "less than one node": "A part of a node is one node: at least 1.",
    "no rest": "rest: step_seconds, and waiting times doublings times (busy + bubble).",
    "rest without the bubble": "`waiting` is of all work: busy and bubble.",
    "the constants of the library": "Hand `constants` on to each of them.",
}


def right(model, plan, machine, c, slip=""):
    """The Step; or what this slip gets."""
    if slip == "the constants of the library":
        c = CONSTANTS
    M = 1 if slip == "one micro-batch" else plan.micro_batches
    P = 1 if slip == "one GPU does all stages' work" else plan.pp
    layers, head = layer_seconds(model, plan, machine, c), head_seconds(model, plan, machine, c)
    head = {} if slip == "the head forgotten" else head
    times = plan.pp if slip == "the head on every stage" else 1
    parts = {name: M / P * (layers[name] + times * head.get(name, 0)) for name in layers}
    busy, each = sum(parts.values()), sum(layers.values()) / model.layers
    sent = sent_seconds(model, plan, machine, busy / M, c)
    sent *= 1 if slip == "messages of one micro-batch" else M
    part = bubble_part(model, plan, machine, c)
    bubble = (busy + sent * (slip != "a bubble without messages")) * part
    bubble /= 1 if slip == "the bubble as a part of the busy time" else 1 - part
    ends = sum(head.values()) * (slip != "the fullest stage without the head")
    fullest = max(n * each + ends * (rank == plan.pp - 1)
                  for rank, n in enumerate(plan.stages(model.layers)))
    bubble += max(0.0, M * fullest - busy) * (slip != "no waiting for the fullest stage")
    beside = busy if slip == "an update beside all micro-batches" else busy / M
    data, optimizer = update_seconds(model, plan, machine, beside, c)
    if slip == "an update for each micro-batch":
        data, optimizer = M * data, M * optimizer
    nodes = plan.gpus / (1 if slip == "doublings of GPUs" else machine.node)
    nodes = nodes if slip == "less than one node" else max(1.0, nodes)
    waits = busy + bubble * (slip != "rest without the bubble")
    rest = (c.step_seconds + c.waiting * math.log2(nodes) * waits) * (slip != "no rest")
    return Step(**parts, pipeline=sent, bubble=bubble, data=data, optimizer=optimizer, rest=rest)


def check_step_time(step_time):
    for node in ("h100-dgx", "a100-dgx", "gb200-nvl72"):
        machine = find_node(node)
        for name, (model, plan, c) in CASES.items():
            _compare(f"{name} ({plan.words()}) on {node}", step_time, MODELS[model], plan, machine,
                     c)
            if (name, node) == ("one GPU", "h100-dgx"):
                yield "right on one GPU"
        if node == "h100-dgx":
            yield "right with stages, virtual stages, uneven ones, context ranks, FSDP, experts"
    yield "right on other machines; parts add up to the total"


def _compare(where, step_time, model, plan, machine, c):
    got, wanted = step_time(model, plan, machine, c), right(model, plan, machine, c)
    expect(isinstance(got, Step), f"{where}: a {type(got).__name__} is returned",
           "Return a Step: Step(**parts, pipeline=..., bubble=..., data=..., optimizer=..., "
           "rest=...).")
    if _same(got, wanted):
        return
    for slip, advice in SLIPS.items():
        wrong = right(model, plan, machine, c, slip)
        expect(not _same(got, wrong) or _same(wrong, wanted), f"{where} is that of: {slip}", advice)
    for field in fields(Step):
        explain(f"{where}: {field.name}, in seconds,", getattr(got, field.name),
                float(getattr(wanted, field.name)))


def _same(got, wanted):
    return all(is_near(getattr(got, field.name), float(getattr(wanted, field.name)))
               for field in fields(Step))
