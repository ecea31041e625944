"""What the pipeline has shown, as text; and the bubble monitor."""

import statistics
from collections import defaultdict

import torch

from ranklab.models.gpt import GPT
from ranklab.pipeline_parallel import bubble_fraction, places, simulate, split_stages
from ranklab.pipeline_parallel.stages import keep_layers
from ranklab.projects.pipeline_parallel.training import stage_costs


def report(found):
    """What `run` found, as text."""
    shape, config, ranks, plan, layers = (
        found[name] for name in ("shape", "config", "ranks", "plan", "layers"))
    first, place = ranks[0], places(plan)
    even = split_stages([0, *[1] * shape.n_layer, 0], len(layers))
    losses = [f"{first[name]:.4f}" if first[name] else "-" for name in ("loss", "alone")]
    lines = [f"{first['steps']} steps of {config.batch} x {shape.n_ctx} tokens in "
             f"{config.micro_batches} micro-batches, {len(layers)} stages", found["authors"],
             "held out: {} nats by the pipeline, {} by one process\n".format(*losses),
             f"rank {'parameters':>13}{'even split':>13}   of messages, bytes, activations: "
             "counted/said"]
    for rank, seen in enumerate(ranks):
        naive = parameters(shape, [even[stage] for stage in place if place[stage] == rank])
        counts = ["{:,}/{:,}".format(*seen[name]) for name in ("messages", "bytes", "kept")]
        lines.append(f"{rank:4} {seen['parameters']:13,}{naive:13,}   {'  '.join(counts)}")
    work = [above_mean(stage_costs(shape, each)) for each in (layers, even)]
    lines.append("work of the largest stage: {:.0%} above the mean, in an even split {:.0%}".format(
        *work))
    slow = f", stage {config.slow_stage} twice as long" * (config.slow_stage >= 0)
    for name, what in (("spans", "a real step (where ranks share a core, waits are no bubble)"),
                       ("asleep", f"emulated: stages sleep as long as their FLOPs say{slow}")):
        busy, bubbles = monitor(sum((seen[name] for seen in ranks), []), plan)
        stage = busy.index(max(busy))
        lines += [f"\n{what}", "busy seconds of each stage: " + " ".join(f"{s:.3f}" for s in busy),
                  "bubble: measured {:.1%}, simulated with these times {:.1%}; "
                  "formula, all stages alike: {:.1%}".format(*bubbles),
                  f"stage {stage} is busy {above_mean(busy):.0%} longer than the mean: it has "
                  f"{layer_names(layers[stage], shape.n_layer)}"]
    return "\n".join(lines)


def monitor(spans, schedule):
    """(seconds for which each stage was busy, bubbles), by the measured spans of all ranks.

    bubbles  measured; simulated with the mean times of each stage; and for stages that are alike,
             which is what the formulas say. Clocks of several machines must agree for the first
    """
    seconds, stages = defaultdict(list), range(len(places(schedule)))
    for _, (kind, stage, _), start, end in spans:
        seconds[kind, stage].append(end - start)
    busy = [sum(sum(seconds[kind, stage]) for kind in "FBIW") for stage in stages]
    means = [[statistics.mean(seconds[kind, stage] or [0]) for stage in stages] for kind in "FBIW"]
    simulated = simulate(schedule, *means)
    return busy, [bubble_fraction(each) for each in (spans, simulated, simulate(schedule))]


def parameters(shape, ranges):
    """Their number in these layers of a GPT."""
    with torch.device("meta"):
        return sum(p.numel() for p in keep_layers(GPT(shape), *ranges).parameters())


def above_mean(values):
    """By which part of the mean the largest is above it."""
    return max(values) / statistics.mean(values) - 1


def layer_names(layers, n_layer):
    """"embedding to block 1"."""
    names = ["embedding", *(f"block {i}" for i in range(n_layer)), "head"]
    return " to ".join(dict.fromkeys([names[layers[0]], names[layers[-1]]]))
