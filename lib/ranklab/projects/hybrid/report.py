"""The results of a training over a mesh, or of a dry run, as text."""

from collections import defaultdict

from ranklab.hybrid import layout_memory, layout_traffic
from ranklab.hybrid.counted import dry_run
from ranklab.pipeline_parallel import bubble_fraction, simulate
from ranklab.planner.constants import CONSTANTS
from ranklab.projects.hybrid.config import JOBS, SIZES
from ranklab.projects.pipeline_parallel.training import layer_names


def report(found):
    """What `run` found, as text."""
    shape, config, layout, ranks = (found[name] for name in ("shape", "config", "layout", "ranks"))
    first, job = ranks[0], config.job(shape)
    loss, alone = (f"{first[name]:.4f}" if first[name] else "-" for name in ("loss", "alone"))
    lines = [f"{first['steps']} steps of {config.batch} x {shape.n_ctx} tokens, {layout}",
             found["authors"], f"held out: {loss} nats by all ranks, {alone} by one process"]
    if first["alone"] and abs(first["loss"] - first["alone"]) > 1e-3:
        lines += ["Ranks add in another order, and each step enlarges the difference. One process",
                  "with another micro-batch drifts, too: compare the losses of the first steps."]
    lines += ["", *who_has_what(ranks, shape.n_layer)]
    if "held" in first:
        lines += costs(job, layout, first["held"], first["sent"])
    if first["shown"]:
        plan = layout.new_schedule()(layout.pp, job.micro_batches(layout))
        said = bubble_fraction(simulate(plan), flush=False)
        lines += ["at the last log: " + ", ".join(" ".join(each) for each in first["shown"].items())
                  + f" ({said:.0%} with equal stages)",
                  "(Ranks that share a core wait for it: that is no bubble.)"]
    return "\n".join(lines)


def who_has_what(ranks, n_layer):
    """A line for each set of ranks with the same layers and the same number of parameters."""
    alike = defaultdict(list)
    for rank, seen in enumerate(ranks):
        layers = " and ".join(layer_names(each, n_layer) for each in seen["layers"])
        alike[layers, seen["parameters"]].append(rank)
    return [f"ranks {' '.join(map(str, who)):24} {numbers:14,} parameters: {layers}"
            for (layers, numbers), who in alike.items()]


def costs(job, layout, held, sent):
    """Bytes of rank 0, by formula and counted."""
    said = layout_memory(job, layout)
    rows = [(f"held: {name.replace('_', ' ')}", getattr(said, name), getattr(held, name))
            for name in (*vars(held), "total") if getattr(held, name)]
    rows += [(f"sent in a step: {axis}", n, sent[axis])
             for axis, n in layout_traffic(job, layout).items()]
    return [f"\n{'bytes of rank 0':28}{'formula':>18}{'counted':>18}",
            *(f"{name:28}{formula:18,.0f}{counted:18,}" for name, formula, counted in rows), ""]


def dry_run_report(size, job=None, layout=None):
    """What the first rank holds and sends, by formula and counted, as text.
    size  a name in SIZES; its job and layout are the defaults
    """
    job, layout = job or JOBS[size], layout or SIZES[size][2]
    held, sent = dry_run(job, layout)
    needs = (held.total + CONSTANTS.context_bytes) / 1e9
    fits = "fits" if needs <= 80 else "does not fit"
    return "\n".join([
        f"{size} on {layout.ranks} GPUs: {layout}, {job.micro_batches(layout)} micro-batches",
        *costs(job, layout, held, sent),
        f"With CUDA and NCCL that is {needs:.1f} GB: it {fits} in 80 GB."])
