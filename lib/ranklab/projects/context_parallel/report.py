"""What the long context has shown, as text."""

from ranklab.engine.report import count_ranks
from ranklab.projects.context_parallel.config import SHARE


def report(found):
    """What `run` found, as text."""
    shape, config, R = found.shape, found.config, len(found.ranks)
    kept = max(seen["kept"] for seen in found.ranks)
    first = found.ranks[0]
    lines = [f"{found.steps} steps of {config.batch} x {shape.n_ctx} tokens on {count_ranks(R)}, "
             f"by {config.method}", found.authors,
             f"a rank sends for attention in a step: counted {first['sent']:,} bytes, "
             f"said {first['said']:,}",
             f"a sequence of {shape.n_ctx} tokens keeps for backward, on the fullest rank: "
             f"{kept:,} bytes"]
    if config.compare:
        budget = found.kept_short * 5 // 4
        verdict = "fits" if kept <= budget else "does not fit"
        lines += [f"one process keeps {found.kept_short:,} bytes of {shape.n_ctx // SHARE} tokens. "
                  f"With a budget of {budget:,}, a quarter more, the long sequence {verdict}"]
    lines.append("\nheld-out nats per token, by position")
    middles = [middle for middle, _ in found.by_position["long"]]
    lines.append(f"{'':14}" + "".join(f"{middle:8.0f}" for middle in middles) + "     mean")
    lines += [f"{name:14}" + "".join(f"{loss:8.3f}" for _, loss in points)
              + f"{found.losses[name]:9.3f}" for name, points in found.by_position.items()]
    if config.compare:
        gaps = [short - long for (_, long), (_, short) in zip(*found.by_position.values())]
        lines.append(f"trained on long sequences, it is better by {gaps[0]:.3f} nats in the first "
                     f"part, where both see as much, and by {gaps[-1]:.3f} in the last")
    return "\n".join(lines)
