"""What the fine-tuning has shown, as text."""

from ranklab.projects.fsdp.llama import NO_TRANSFORMERS


def report(found):
    """What `run` found, as text; or what to install."""
    if found is None:
        return NO_TRANSFORMERS
    settings, (model, *blocks) = found["settings"], found["numbers"]
    name, train, held_out = found["data"]
    lines = [
        f"model     {settings.model or 'a Llama from scratch'}: {model:,} parameters, "
        f"{len(blocks)} blocks of {max(blocks, default=0):,} at most",
        f"data      {name}: {train:,} to train on, {held_out:,} held out",
        f"training  {settings.engine}, {found['ranks']} ranks, {settings.steps} steps of "
        f"{settings.batch} examples, {settings.precision}, {found['speed']:,.0f} examples/s",
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
    states, traffic = predicted(found["numbers"], found["settings"], found["ranks"])
    rows = {"parameters": held.parameters, "gradients": held.gradients,
            "optimizer": held.optimizer_state, "sent in a step": sent}
    lines = [f"{name:28}{formula:14,.0f}{counted:14,}"
             for (name, counted), formula in zip(rows.items(), [*states, traffic])]
    return [f"\n{'bytes on rank 0':28}{'formula':>14}{'counted':>14}", *lines,
            f"{'peak, with activations':42}{peak:14,}"]


def predicted(numbers, settings, ranks):
    """((bytes of parameters, gradients, optimizer), bytes sent in a step), of each rank.

    Rows, gradients and Adam's two moments are in float32. For each micro-batch parameters are
    gathered, those of blocks twice, and gradients reduced; in hybrid sharding over copies, too.
    numbers  of parameters: in the model, and in each of its blocks
    """
    model, *blocks = numbers
    S = settings.shard_ranks or ranks
    copies, pieces = ranks // S, -(-settings.batch // (ranks * settings.micro_batch))
    gathered = (2 if settings.precision == "bf16" else 4) * (model + sum(blocks))
    inside = (S - 1) / S * (gathered + 4 * model)
    between = 2 * (copies - 1) / copies * 4 * model / S
    return [size * model / S for size in (4, 4, 8)], pieces * (inside + between)
