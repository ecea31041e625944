"""What the pipeline has shown, as text."""

from ranklab.models.gpt import block_parameters
from ranklab.pipeline_parallel import split_stages
from ranklab.pipeline_parallel.stages import gpt_costs
from ranklab.projects.pipeline_parallel.monitor import above_mean, monitor


def report(found):
    """What `run` found, as text."""
    shape, settings, ranks = found["shape"], found["settings"], found["ranks"]
    first, plan = ranks[0], found["schedule"](len(ranks), settings.micro_batches)
    layers, place = first["layers"], first["place"]
    even = split_stages([0, *[1] * shape.n_layer, 0], len(layers))
    lines = [
        f"{first['steps']} steps of {settings.batch} x {shape.n_ctx} tokens of {found['text']} in "
        f"{settings.micro_batches} micro-batches; {len(layers)} stages on {len(ranks)} ranks",
        f"held out: {nats(first['loss'])}; one process {nats(first['alone'])}\n",
        f"{'rank: its layers':38}{'parameters':>11}{'even split':>11}{'messages':>12}{'kept':>8}"
        f"{'bytes sent':>20}"]
    for rank, seen in enumerate(ranks):
        mine = [stage for stage, owner in place.items() if owner == rank]
        names = ", ".join(layer_names(layers[stage], shape) for stage in mine)
        of_even = parameters([layer for stage in mine for layer in even[stage]], shape)
        counts = "".join(f"{'{:,} of {:,}'.format(*reversed(seen[name])):>{width}}"
                         for name, width in (("messages", 12), ("kept", 8), ("bytes", 20)))
        lines.append(f"{f'{rank}: {names}':38}{seen['parameters']:11,}{of_even:11,}{counts}")
    work = [[sum(gpt_costs(shape)[i] for i in stage) for stage in each] for each in (even, layers)]
    lines += ["(4 of 5: counted 4, predicted 5) The slowest stage has more work than the mean stage,"
              " by an even split {:.0%}, by this one {:.0%}.".format(*map(above_mean, work))]
    slow = f", stage {settings.slow_stage} twice" if settings.slow_stage >= 0 else ""
    for name, what in (("spans", "the training: ranks that share a core say little of a bubble"),
                       ("asleep", f"emulated: stages sleep in proportion to their FLOPs{slow}")):
        busy, bubbles = monitor(sum((seen[name] for seen in ranks), []), plan)
        stage = busy.index(max(busy))
        lines += [f"\n{what}", "busy seconds of each stage: " + " ".join(f"{s:.3f}" for s in busy),
                  "bubble: measured {:.1%}; simulated with these times {:.1%}; formula, where all "
                  "stages are alike {:.1%}".format(*bubbles),
                  f"stage {stage} is busy {above_mean(busy):.0%} longer than the mean: it has "
                  f"{layer_names(layers[stage], shape)}"]
    return "\n".join(lines)


def nats(loss):
    return f"{loss:.4f} nats" if loss else "not there"


def layer_names(layers, shape):
    """"blocks 5-7, head"."""
    blocks = [layer - 1 for layer in layers if 0 < layer <= shape.n_layer]
    named = [f"block{'s' * (len(blocks) > 1)} " + "-".join(map(str, sorted({blocks[0], blocks[-1]})))
             ] if blocks else []
    return ", ".join(["embedding"] * (0 in layers) + named + ["head"] * (shape.n_layer + 1 in layers))


def parameters(layers, shape):
    """Of these layers; a matrix that is embedding and head of one rank counts once."""
    ends = {0, shape.n_layer + 1} & set(layers)
    blocks = len(layers) - len(ends)
    return (blocks * block_parameters(shape) + bool(ends) * shape.vocab_size * shape.n_embd
            + (shape.n_layer + 1 in ends) * shape.n_embd)
