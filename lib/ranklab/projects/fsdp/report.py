"""What the fine-tuning has shown, as text."""

from ranklab.engine.report import count_ranks
from ranklab.fsdp.memory import predicted_costs

NO_TRANSFORMERS = ("transformers is not here. After pip install -c constraints.txt -e '.[hf]' this "
                   "runs: python -m ranklab.projects.fsdp")  # fmt: skip


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
        f"training  {config.engine}, {count_ranks(found['ranks'])}, {config.steps} steps of "
        f"{config.batch} examples, {config.precision}, {found['speed']:,.0f} examples/s",
        found["authors"], *costs(found), f"\n{'held out':28}{'loss (nats)':>14}{'exact match':>14}",
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
    rows = zip(names, predicted_costs(found["numbers"], found["config"], found["ranks"]), counted)
    return [f"\n{'bytes on rank 0':28}{'formula':>14}{'counted':>14}",
            *(f"{name:28}{formula:14,.0f}{count:14,}" for name, formula, count in rows),
            f"{'peak, with activations':42}{peak:14,}"]
