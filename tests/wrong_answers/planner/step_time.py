"""Lab 13: a step whose parts are of the wrong GPU, or of the wrong number of micro-batches."""

from mutants import mutant

from ranklab.planner.step import CONSTANTS, Step, layer_seconds, step_time

SENT = "M * sent_seconds(model, plan, machine, busy / M, c)"
BUBBLE = "(busy + sent) * part / (1 - part)"
WAITS = "max(0.0, M * fullest - busy)"
FULLEST = "n * layer + (rank == P - 1) * ends"
UPDATE = "update_seconds(model, plan, machine, busy / M, c)"

WRONG = [mutant(step_time, *edits, says=says, called=called) for *edits, says, called in (
    ("M / P * (layers", "M * (layers", "pp stages share the layers", "all_stages_on_one"),
    ("M / P * (layers", "1 / P * (layers", "products, in seconds|of: one micro", "one_micro_batch"),
    ("M / P * (layers[part] + head.get(part, 0))", "M / P * layers[part]",
     "head in no part", "no_head"),
    (", head_seconds(model, plan, machine, c)", ", {}", "the head forgotten", "no_head_at_all"),
    ("M / P * (layers[part] + head.get(part, 0))", "M / P * layers[part] + M * head.get(part, 0)",
     "head on every stage", "head_on_all"),
    (BUBBLE, "(busy + sent) * part", "part of the busy time", "of_the_busy_time"),
    (BUBBLE, "busy * part / (1 - part)", "bubble without messages", "no_messages"),
    (BUBBLE, "0.0", "bubble, in seconds", "no_schedule"),
    (f"bubble = {BUBBLE} + {WAITS}", "bubble = 0.0", "no bubble", "no_bubble"),
    (f"{BUBBLE} + {WAITS}", BUBBLE, "no waiting for the fullest", "no_waiting"),
    (f"{BUBBLE} + {WAITS}", "(M * fullest + sent) * part / (1 - part) + M * fullest - busy",
     "the schedule's part of the fullest", "the_fullests_bubble"),
    (WAITS, "max(0.0, fullest - busy / M)", "waiting of one micro-batch", "waits_once"),
    (FULLEST, "n * layer", "fullest stage without the head", "no_ends"),
    (FULLEST, "n * layer + ends", "the stage with most layers", "head_on_the_fullest"),
    (FULLEST, "n * layer + (rank == 0) * ends", "bubble, in seconds", "head_on_the_first"),
    (SENT, SENT.removeprefix("M * "), "messages of one micro-batch", "sent_once"),
    (SENT, SENT.replace("busy / M", "busy"), "messages beside all", "sent_beside_all"),
    (SENT, "0.0", "pipeline, in seconds", "nothing_sent"),
    (UPDATE, UPDATE.replace("busy / M", "busy"), "update beside all", "update_beside_all"),
    (f"= {UPDATE}", f"= (M * each for each in {UPDATE})", "once a step", "update_each_time"),
    (f"data, optimizer = {UPDATE}", f"optimizer, data = {UPDATE}", "(data|optimizer), in seconds",
     "exchanged"),
    ("rest=c.step_seconds", "rest=0.0", "no rest", "no_rest"),
    ("c, M, P = constants,", "c, M, P = CONSTANTS,", "constants of the library", "its_constants"),
    ("layer_seconds(model, plan, machine, c)", "layer_seconds(model, plan, machine)",
     "products, in seconds", "layers_of_its_constants"),
    ("busy / M, c)\n    return", "busy / M)\n    return", "(data|optimizer), in seconds",
     "update_of_its_constants"),
    ("bubble_part(model, plan, machine, c)", "(P - 1) / (M + P - 1)",
     "(virtual stages|zero bubble).*bubble, in seconds", "always_1f1b"),
)]  # fmt: skip


def step_time__mfu_of_a_half(model, plan, machine, constants=CONSTANTS):
    """products, in seconds: yours"""
    flops = model.flops_per_token(plan.sequence) * plan.batch * plan.sequence
    seconds = flops / plan.gpus / machine.peak_flops / 0.5
    return Step(seconds, *12 * [0.0])


def step_time__the_total_alone(model, plan, machine, constants=CONSTANTS):
    """a float is returned.*Return the Step"""
    parts = layer_seconds(model, plan, machine, constants)
    return plan.micro_batches / plan.pp * sum(parts.values())


def step_time__a_dictionary(model, plan, machine, constants=CONSTANTS):
    """a dict is returned.*Return the Step"""
    return layer_seconds(model, plan, machine, constants)
