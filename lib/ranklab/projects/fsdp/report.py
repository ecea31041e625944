"""What the fine-tuning has shown, as text."""

from ranklab.projects.fsdp.llama import NO_TRANSFORMERS
from ranklab.projects.fsdp.measure import predicted


def report(found):
    """What `run` found, as text; or what to install."""
    if found is None:
        return NO_TRANSFORMERS
    settings, ranks, blocks = found["settings"], found["ranks"], found["blocks"]
    name, train, held_out = found["data"]
    first, last = found["steps"]
    mine = ", ".join(found["own"])
    lines = [
        f"model     {settings.model or 'a Llama from scratch'}, {found['numbers']:,} parameters, "
        f"{len(blocks)} blocks of {max(blocks, default=0):,} at most and the root",
        f"data      {name}: {train:,} examples to train on, {found['scored']:,} of {held_out:,} "
        "held-out ones to score",
        f"training  {settings.engine}, {ranks} ranks, {last} steps of {settings.batch} examples, "
        f"{settings.precision}, {found['examples_per_second']:,.0f} examples/s",
        f"yours     {mine or 'none yet'} (of block, clip, loss, policy, state)",
        "",
        *costs(found, predicted(found["numbers"], blocks, settings, ranks)),
        f"{'held out':28}{'loss (nats/token)':>18}{'exact match':>14}",
    ]
    for step, score in zip((first, last), found["scores"]):
        lines.append(f"{f'after step {step}':28}{score.loss:18.3f}{score.exact:14.1%}")
    return "\n".join(lines)


def costs(found, said):
    """Lines: a rank's bytes, by the formulas and counted; none where too few steps were done."""
    if found["costs"] is None:
        return []
    held, peak, sent = found["costs"]
    rows = [("parameters", held.parameters), ("gradients", held.gradients),
            ("optimizer", held.optimizer_state), ("sent in a step", sent)]
    lines = [f"{'bytes on rank 0':28}{'formula':>18}{'counted':>14}"]
    lines += [f"{name:28}{formula:18,.0f}{counted:14,}"
              for (name, counted), formula in zip(rows, (*said[0], said[1]))]
    return [*lines, f"{'peak, with activations':28}{'':18}{peak:14,}", ""]
