"""What a training over a mesh has shown, as text."""

from collections import defaultdict

from ranklab.hybrid import layout_memory, layout_traffic
from ranklab.pipeline_parallel import bubble_fraction, simulate
from ranklab.projects.pipeline_parallel.report import layer_names

HELD = ("parameters", "gradients", "optimizer_state", "activations", "total")


def report(found):
    """What `run` found, as text."""
    shape, config, layout, ranks = (found[name] for name in ("shape", "config", "layout", "ranks"))
    first, history, job = ranks[0], ranks[0]["history"], config.job(shape)
    losses = [f"{first[name]:.4f}" if first[name] else "-" for name in ("loss", "alone")]
    lines = [f"{first['steps']} steps of {config.batch} x {shape.n_ctx} tokens, {layout}",
             found["authors"],
             "held out: {} nats by all ranks, {} by one process".format(*losses),
             *drift(first["loss"], first["alone"]), "", *who_has_what(ranks, shape.n_layer)]
    if "held" in first:
        lines += costs(job, layout, first)
    if history.steps:
        plan = layout.new_schedule()(layout.pp, job.micro_batches(layout))
        said = bubble_fraction(simulate(plan), flush=False)
        lines += ["bubble: measured {:.0%}, with equal stages {:.0%} (ranks that share a core wait "
                  "for it: no bubble)".format(history.bubble[-1], said),
                  f"{history.speed[-1]:,.0f} tokens/s, MFU "
                  + (f"{history.mfu[-1]:.1%}" if history.mfu[-1] else "-: peak not known")]
    return "\n".join(lines)


def drift(loss, alone):
    """What to think of two losses that are not alike; nothing where they are."""
    if not (loss and alone) or abs(loss - alone) < 1e-3:
        return []
    return ["Ranks add in another order, and each step enlarges the difference. One process does",
            "the same: with first weights that differ by 1e-7 of themselves it ended between 2.721",
            "and 2.762 after 150 steps (8 runs, seen once). So compare the first steps' losses."]


def who_has_what(ranks, n_layer):
    """A line for each set of ranks that hold the same layers, and as many parameters of them."""
    alike = defaultdict(list)
    for rank, seen in enumerate(ranks):
        layers = " and ".join(layer_names(each, n_layer) for each in seen["layers"])
        alike[layers, seen["parameters"]].append(rank)
    return [f"ranks {' '.join(map(str, who)):24} {numbers:14,} parameters: {layers}"
            for (layers, numbers), who in alike.items()]


def costs(job, layout, first):
    """Bytes of rank 0, by formula and counted."""
    said, sent = layout_memory(job, layout), layout_traffic(job, layout)
    rows = [(f"held: {name.replace('_', ' ')}", getattr(said, name), getattr(first["held"], name))
            for name in HELD]
    rows += [(f"sent in a step: {axis}", n, first["sent"].get(axis, 0)) for axis, n in sent.items()]
    if first["allocated"]:
        rows.append(("held: by the allocator", said.total, first["allocated"]))
    return [f"\n{'bytes of rank 0':28}{'formula':>18}{'counted':>18}",
            *(f"{name:28}{formula:18,.0f}{counted:18,}" for name, formula, counted in rows), ""]
