"""What the fine-tuning has shown, as text."""

from ranklab.projects.fsdp.llama import NO_TRANSFORMERS
from ranklab.projects.fsdp.measure import predicted


def report(found):
    """What `run` found, as text; or what to install."""
    if found is None:
        return NO_TRANSFORMERS
    settings, (model, *blocks), (name, train, held_out) = (
        found[key] for key in ("settings", "numbers", "data"))
    first, last = found["steps"]
    rows = "\n".join(f"{f'after step {step}':28}{score.loss:14.3f}{score.exact:14.1%}"
                     for step, score in zip((first, last), found["scores"]))
    return f"""\
model     {settings.model or "a Llama from scratch"}: {model:,} parameters, {len(blocks)} blocks \
of {max(blocks, default=0):,} at most
data      {name}: {train:,} to train on, {found["scored"]:,} of {held_out:,} held out are scored
training  {settings.engine}, {found["ranks"]} ranks, {last} steps of {settings.batch} examples, \
{settings.precision}, {found["speed"]:,.0f} examples/s
your own  {", ".join(found["own"]) or "none"} of block, clip, loss, policy, state
{costs(found)}
{"held out":28}{"loss (nats)":>14}{"exact match":>14}
{rows}"""


def costs(found):
    """A rank's bytes, by the formulas and counted; nothing where too few steps were done."""
    if found["costs"] is None:
        return ""
    held, peak, sent = found["costs"]
    states, traffic = predicted(found["numbers"], found["settings"], found["ranks"])
    rows = {"parameters": held.parameters, "gradients": held.gradients,
            "optimizer": held.optimizer_state, "sent in a step": sent}
    lines = [f"\n{'bytes on rank 0':28}{'formula':>14}{'counted':>14}"]
    lines += [f"{name:28}{formula:14,.0f}{counted:14,}"
              for (name, counted), formula in zip(rows.items(), [*states, traffic])]
    return "\n".join([*lines, f"{'peak, with activations':42}{peak:14,}", ""])
