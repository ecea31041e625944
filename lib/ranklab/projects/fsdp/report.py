"""What the fine-tuning has shown, as text."""

from ranklab.projects.fsdp.llama import NO_TRANSFORMERS


def report(found):
    """What `run` found, as text; or what to install."""
    if found is None:
        return NO_TRANSFORMERS
    config, (model, *blocks) = found["config"], found["numbers"]
    name, train, held_out = found["data"]
    lines = [
        f"model     {config.model or 'a Llama from scratch'}: {model:,} parameters, "
        f"{len(blocks)} blocks of {max(blocks, default=0):,} at most",
        f"data      {name}: {train:,} to train on, {held_out:,} held out",
        f"training  {config.engine}, {found['ranks']} ranks, {config.steps} steps of "
        f"{config.batch} examples, {config.precision}, {found['speed']:,.0f} examples/s",
        found["authors"],
        *costs(found),
        f"\n{'held out':28}{'loss (nats)':>14}{'exact match':>14}",
    ]
    for step, score in found["scores"].items():
        seen = f"{score.loss:14.3f}{score.exact:14.1%}" if score else f"{'stopped':>14}"
        lines.append(f"{f'after step {step}':28}{seen}")
    return "\n".join(lines)


def costs(found):
    """A rank's bytes, by the formulas and counted; nothing where too few steps were done."""
    if found["costs"] is None:
        return []
    [held], peak, sent = found["costs"]
    counted = held.parameters, held.gradients, held.optimizer_state, sent
    names = "parameters", "gradients", "optimizer", "sent in a step"
    rows = zip(names, predicted(found["numbers"], found["config"], found["ranks"]), counted)
    return [f"\n{'bytes on rank 0':28}{'formula':>14}{'counted':>14}",
            *(f"{name:28}{formula:14,.0f}{count:14,}" for name, formula, count in rows),
            f"{'peak, with activations':42}{peak:14,}"]


def predicted(numbers, config, ranks):
    """[bytes of parameters, of gradients, of the optimizer, sent in a step] of each rank.

    Rows, gradients and Adam's two moments are in float32. For each micro-batch parameters are
    gathered, those of blocks twice, and gradients reduced; in hybrid sharding over copies, too.
    numbers  of parameters: in the model, and in each of its blocks
    """
    model, *blocks = numbers
    S = config.shard_ranks or ranks
    copies, pieces = ranks // S, -(-config.batch // (ranks * config.micro_batch))
    gathered = (2 if config.precision == "bf16" else 4) * (model + sum(blocks))
    inside = (S - 1) / S * (gathered + 4 * model)
    between = 2 * (copies - 1) / copies * 4 * model / S
    return [*(size * model / S for size in (4, 4, 8)), pieces * (inside + between)]
