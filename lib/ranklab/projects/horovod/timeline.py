"""Where the time of a training run went, by Horovod's timeline, and what would reduce it."""

from ranklab.horovod.trace import all_reduces

KINDS = {  # what it is, and what helps. Of what goes on at the same time, the first one counts
    "all-reduce": ("gradients are on the wire", "Send less (Compression.fp16), or fewer and larger "
                   "messages (a higher fusion threshold, where each carries few tensors)."),
    "fusion copies": ("into the fusion buffer and out of it", "Try a lower fusion threshold."),
    "negotiation": (
        "a gradient waits: another rank, the next cycle, an all-reduce before it",
        "A rank is late (ticks in the first step's rows say which), or the cycle is too long."),
    "computing": (
        "no gradient waits: forward, first part of backward, optimizer, data",
        "Horovod is not in the way: make the model's own step faster, or its batch larger."),
}


def kind_of(phase):
    """Return its kind of time; None for ALLREDUCE, which spans all kinds, and other verbs."""
    if phase.name in ("NEGOTIATE_ALLREDUCE", "QUEUE"):
        return "negotiation"
    if phase.name.startswith("MEMCPY_"):
        return "fusion copies"
    return "all-reduce" if phase.is_all_reduce else None


def shares(phases):
    """Return {kind: share of the time} from the first to the last phase; the shares add up to 1.

    Each moment counts once: as an all-reduce if one is running, else as copying, else as waiting.
    """
    edges = sorted((moment, step, kind) for phase in phases if (kind := kind_of(phase))
                   for moment, step in ((phase.start, 1), (phase.end, -1)))
    if not edges:
        raise ValueError("this timeline holds no all-reduce")
    running, seconds, start = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0), edges[0][0]
    for moment, step, kind in edges:
        activity = next((k for k in KINDS if running[k]), "computing")
        seconds[activity] += moment - start
        running[kind] += step
        start = moment
    return {kind: part / (edges[-1][0] - edges[0][0]) for kind, part in seconds.items()}


def table(phases):
    """Return the timeline as text; the last line names the bottleneck and a remedy."""
    time_shares, carried = shares(phases), all_reduces(phases)
    whole = max(p.end for p in phases) - min(p.start for p in phases)
    most = max(time_shares, key=time_shares.get)
    return "\n".join([
        f"{whole:.2f} s, {len(carried)} all-reduces of {sum(carried)} gradients",
        *(f"{kind:14} {time_shares[kind]:5.0%}   {text}" for kind, (text, _) in KINDS.items()),
        f"bottleneck: {most}, {time_shares[most]:.0%} of the time. {KINDS[most][1]}"])
