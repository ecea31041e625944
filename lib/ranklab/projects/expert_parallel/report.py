"""What the experts have shown, as text."""

from ranklab.engine.report import count_ranks
from ranklab.expert_parallel import moe_parameters


def report(found):
    """What `run` found, as text."""
    shape, config, R = found.shape, found.config, len(found.ranks)
    everything, active = moe_parameters(shape)
    most = [max(load) for load in found.loads[-1][1]] if found.loads else []
    first = found.ranks[0]
    lines = [f"{found.steps} steps of {config.batch} x {shape.n_ctx} tokens on {count_ranks(R)}, "
             f"{shape.n_expert} experts over {config.ep or R}, top {shape.top_k}", found.authors,
             f"{everything:,} numbers, of which a token meets {active:,}",
             f"rank 0 sends rows and counts in one more step: counted {first['sent']:,} bytes, "
             f"said {first['said']:,}",
             f"the fullest expert of each layer, beside the mean, balanced by {config.balance}: "
             + ", ".join(f"{load:.2f}" for load in most),
             f"choices dropped: {found.dropped:.1%}"]
    lines += [f"held out, {name:8} {loss:.3f} nats" for name, loss in found.losses.items()]
    return "\n".join(lines)
