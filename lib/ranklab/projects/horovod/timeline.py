"""Reading a Horovod timeline, ours or the real one's: where the time went, and what to do about it.

    HOROVOD_TIMELINE=trace.json horovodrun -np 4 python train.py
    python -m ranklab.projects.horovod --read trace.json
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

KINDS = {  # what it is, and what helps. Of what goes on at the same time, the first one counts
    "all-reduce": (
        "gradients are on the wire",
        "Send less (Compression.fp16), or fewer and larger messages (a higher fusion threshold, "
        "where an all-reduce carries few tensors)."),
    "fusion copies": ("into the fusion buffer and out of it", "Try a lower fusion threshold."),
    "negotiation": (
        "a gradient waits: another rank, the next cycle, an all-reduce before it",
        "A rank is late: its data, its machine, or too few cores for the ranks; or the cycle time "
        "is too long; or an all-reduce before it is still on the wire, one thread does one after "
        "the other. The ticks in the first step's rows say which rank."),
    "computing": (
        "no gradient waits: forward, first part of backward, optimizer, data",
        "Horovod is not in the way: make the model's own step faster, or its batch larger."),
}


class Phase(NamedTuple):
    """One phase of one tensor; seconds since the timeline began."""

    tensor: str
    name: str  # NEGOTIATE_ALLREDUCE, MEMCPY_IN_FUSION_BUFFER, GLOO_ALLREDUCE, ...
    start: float
    end: float


def read_timeline(path):
    """The phases in a timeline, in the order in which they began.

    Horovod writes a begin and an end, ours a duration; and Horovod's file may lack its last
    bracket, when the job was ended.
    error  ValueError: the file is no timeline
    """
    try:
        text = Path(path).read_text().rstrip().rstrip(",")
        if text.startswith("[") and not text.endswith("]"):
            text = text[: text.rindex("}") + 1] + "]"
        events = json.loads(text)
        return _phases(events["traceEvents"] if isinstance(events, dict) else events)
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is no timeline: {type(error).__name__} {error}") from None


def _phases(events):
    tensor, begun, phases = {}, defaultdict(list), []
    for event in events:
        row, at = event["pid"], event.get("ts", 0) / 1e6
        if event["ph"] == "M" and "name" in event["args"]:
            tensor[row] = event["args"]["name"]
        elif event["ph"] == "B":
            begun[row].append((event["name"], at))
        elif event["ph"] == "E" and begun[row]:
            phases.append(Phase(tensor.get(row, str(row)), *begun[row].pop(), at))
        elif event["ph"] == "X" and event.get("dur"):
            phases.append(Phase(tensor[row], event["name"], at, at + event["dur"] / 1e6))
    return sorted(phases, key=lambda phase: (phase.start, -phase.end))


def kind_of(name):
    """What kind of time a phase is; None for ALLREDUCE, which is all of them, and other verbs."""
    if name in ("NEGOTIATE_ALLREDUCE", "QUEUE"):
        return "negotiation"
    if name.startswith("MEMCPY_"):
        return "fusion copies"
    return "all-reduce" if name.endswith("_ALLREDUCE") else None


def shares(phases):
    """{kind: share of the time} from the first to the last phase; together 1.

    A moment counts once: as an all-reduce when any is running, else as copying, else as waiting.
    """
    edges = sorted((at, step, kind_of(phase.name)) for phase in phases if kind_of(phase.name)
                   for at, step in ((phase.start, 1), (phase.end, -1)))
    if not edges:
        raise ValueError("this timeline holds no all-reduce")
    running, seconds, since = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0), edges[0][0]
    for at, step, kind in edges:
        now = next((k for k in KINDS if running[k]), "computing")
        seconds[now] += at - since
        running[kind] += step
        since = at
    whole = edges[-1][0] - edges[0][0]
    return {kind: part / whole for kind, part in seconds.items()}


def all_reduces(phases):
    """How many tensors each all-reduce carried: [17, 24, ...].

    One thread does them one after the other, so what overlaps was fused into one.
    """
    carried, end = [], -1.0
    for phase in phases:
        if kind_of(phase.name) != "all-reduce":
            continue
        if phase.start >= end:
            carried.append(0)
            end = phase.end
        carried[-1] += 1
    return carried


def bottleneck(found):
    """The largest of the `shares`, and what helps against it, in a sentence."""
    kind = max(found, key=found.get)
    return f"bottleneck: {kind}, {found[kind]:.0%} of the time. {KINDS[kind][1]}"


def table(phases):
    """What the timeline says, as text."""
    found, carried = shares(phases), all_reduces(phases)
    whole = max(p.end for p in phases) - min(p.start for p in phases)
    lines = [f"{kind:14} {found[kind]:5.0%}   {what}" for kind, (what, _) in KINDS.items()]
    return "\n".join([f"{whole:.2f} s, {len(carried)} all-reduces of {sum(carried)} gradients",
                      *lines, bottleneck(found)])


def one_step(phases, number=-2):
    """The phases of one training step: from when the first tensor of it waits.

    A step begins where a tensor that was reduced is asked for again. The last but one by default:
    early steps negotiate by name, and the last one may be cut off.
    """
    steps, seen = [[]], set()
    for phase in phases:
        if phase.name == "NEGOTIATE_ALLREDUCE":
            if phase.tensor in seen:
                steps.append([])
                seen = set()
            seen.add(phase.tensor)
        steps[-1].append(phase)
    return steps[number if len(steps) > 1 else -1]
