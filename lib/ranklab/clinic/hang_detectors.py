"""Detectors of hangs and slowdowns (which rank is slow is judged as in resilience)."""

import contextlib
import itertools
import socket
from collections import Counter, defaultdict

import psutil
import torch

from ranklab.clinic import detectors
from ranklab.engine.report import rank_names
from ranklab.resilience.straggler import find_straggler

ONE_SIZE = ("all_reduce", "reduce", "broadcast", "reduce_scatter")  # on all ranks the same
SLOW = 1.5  # times the usual work in a step
LEAST = 100  # MFLOP in a step: of less work, starting the ops takes most of the time


def collective_order(ranks):
    """All ranks of a group make the same calls, in different orders."""
    for group, calls, number in _differences(ranks):
        if not _stranger(calls, number):
            said = "; ".join(f"{rank_names(of)}: {what}" for what, of in _by(
                lambda call: f"{_said(call)} at {call.line}", calls, number).items())
            return f"call {number} in {_named(group, ranks)} is not the same on its ranks: {said}"
    return None


def rank_branch(ranks):
    """A rank makes a call that others don't make."""
    for group, calls, number in _differences(ranks):
        stranger = _stranger(calls, number)
        if stranger:
            line, having = stranger
            others = [rank for rank in calls if rank not in having]
            return (f"{rank_names(having)} of {_named(group, ranks)} came to {line}, "
                    f"{rank_names(others)} never did: call {number} of the group is "
                    f"{_said(calls[having[0]][number])} there and "
                    f"{_said(calls[others[0]][number])} elsewhere")
    for group, calls in _groups(ranks).items():
        most = max(map(len, calls.values()))
        short = {rank: len(each) for rank, each in calls.items() if len(each) < most}
        ended = [rank for rank in calls if _of(ranks, rank).fate.startswith("raised")]
        waiting = [rank for rank in calls if rank not in short
                   and (rank in ended or _waits(_of(ranks, rank)))]
        done = [rank for rank in short if _of(ranks, rank).fate == "returned"]
        if done and waiting:
            last = calls[waiting[0]][-1]
            said = "raised" if waiting[0] in ended else f"wait{'s' * (len(waiting) == 1)}"
            return (f"{rank_names(waiting)} {said} in call {most} of {_named(group, ranks)}, "
                    f"{last.kind} at {last.line}; {rank_names(done)} returned after "
                    f"{min(short[rank] for rank in done)} calls")
    return None


def communicator_order(ranks):
    """Ranks wait for each other in different groups."""
    last = {r.number: ours[-1] for r in ranks if _waits(r)
            and (ours := [call for call in r.calls if call.number >= 0])}
    waits = {}
    for number, call in last.items():
        members = _of(ranks, number).groups.get(call.group, ())
        waits[number] = {r.number for r in ranks if r.number in members and not any(
            other.group == call.group and other.number >= call.number for other in r.calls)}
    circle = detectors.circle_of_waits(waits)
    if len({last[rank].group for rank in circle}) < 2:
        return None
    parts = [f"rank {rank} waits for rank {circle[(i + 1) % len(circle)]} in {last[rank].kind} of "
             f"{_named(last[rank].group, ranks)} at {last[rank].line}"
             for i, rank in enumerate(circle)]
    return "; ".join(parts)


def sync_every_micro_step(ranks):
    """Gradients are all-reduced after each backward of a step, not once."""
    seen, all_steps = [], sum(len(rank.steps) for rank in ranks)
    for rank in ranks:
        for step in rank.steps:
            total = sum(digest.numel for digest in step.final if digest)
            sent = Counter()
            for call in rank.calls:
                if call.step == step.number and call.kind == "all_reduce" and (
                        call.in_backward or call.which.startswith("gradient")):
                    sent[call.backwards + call.in_backward] += call.digest.numel
            if step.backwards > 1 and total:
                each = [sent[i] for i in range(1, step.backwards + 1)]
                seen.append((step.backwards, total, all(abs(n - total) < 0.01 * total
                                                        for n in each)))
    if 2 * len(seen) <= all_steps or sum(ok for *_, ok in seen) < 0.8 * len(seen):
        return None
    times, total, _ = max(seen)
    return (f"a step has {times} backwards, and after each of them all {total:,} numbers of the "
            f"gradient are all-reduced: {times * total:,} numbers a step where {total:,} do")


def straggler(ranks):
    """One rank has more work in a step than the others, which wait for it.

    Work is counted, not timed: on a busy machine a healthy rank is slow, too. So a rank that is
    slow for another reason (its card, its loader) is not seen; find_straggler of lab 14 sees it.
    """
    alike = [r for r in ranks if r.steps and [m and m.numel for m in r.steps[0].final]
             == [m and m.numel for m in ranks[0].steps[0].final]] if ranks[0].steps else []
    count = min((len(r.steps) for r in alike), default=0)
    if len(alike) < 2 or len(alike) < len(ranks) or count < 2:
        return None
    flops = torch.tensor([[r.steps[i].flops / 1e6 for r in alike] for i in range(count)])
    slow = find_straggler(flops, SLOW)
    usual = flops.median(dim=0).values
    if not slow or usual.max() < LEAST:
        return None
    rest = usual[[i for i in range(len(alike)) if i != slow[0]]]
    return (f"rank {alike[slow[0]].number} computes {usual[slow[0]]:.3g} MFLOP in a step, the "
            f"others {rest.min():.3g} to {rest.max():.3g} (median of {len(flops)} steps)")


DETECTORS = {each.__name__: each for each in (
    collective_order, rank_branch, communicator_order, sync_every_micro_step, straggler)}
WHOLE = ("collective_order", "rank_branch", "communicator_order")  # look at all of a run at once


def whereabouts(ranks):
    """A line for each rank that did not return: where it waits, and after which calls; or that it
    has left nothing.
    """
    lines = []
    for r in ranks:
        ours = [call for call in r.calls if call.number >= 0]
        if r.fate != "returned":
            last = ours[-1] if ours else None
            where = (f"last called {last.kind}, call {last.number} of {_named(last.group, ranks)}, "
                     f"at {last.line}" if last else "made no call")
            waits = f"; waits at {r.waits}" if r.waits else ""
            lines.append(f"rank {r.number} {where}{waits}; {r.fate or _still(r)}")
    known = {r.number for r in ranks}
    missing = {number for r in ranks for each in r.groups.values() for number in each} - known
    return lines + [f"{rank_names(sorted(missing))} left nothing here"] * bool(missing)


def _still(rank):
    """What its process does, or that there is none; no other host can tell."""
    host, number, began = rank.process or ("", 0, 0)
    if host != socket.gethostname():
        return "it runs, or was killed"
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(number)
        if process.create_time() == began and process.status() != psutil.STATUS_ZOMBIE:
            return "it is stopped" if process.status() == psutil.STATUS_STOPPED else "it runs"
    return "it was killed"


# --- groups and their calls -----------------------------------------------------------------------

def _groups(ranks):
    """{group: {rank: its calls there, from a number that all have}}"""
    groups = defaultdict(dict)
    for r in ranks:
        for name, members in r.groups.items():
            if len(members) > 1:
                groups[name][r.number] = r.in_group(name)
    for name, calls in groups.items():  # a member that made no call has no line for the group
        members = max((r.groups.get(name, ()) for r in ranks), key=len)
        calls |= {rank: [] for rank in members if rank not in calls
                  and any(r.number == rank for r in ranks)}
    return groups


def _differences(ranks):
    """(group, calls, number of the first that differs) of each group in which there is one."""
    shapes = {r.number: tuple(m and m.numel for m in r.steps[0].final) if r.steps else ()
              for r in ranks}
    for group, calls in _groups(ranks).items():
        is_one = len({shapes[rank] for rank in calls}) == 1  # so parameters have the same numbers
        known = [is_one and all(call.which for call in same if call)
                 for same in itertools.zip_longest(*calls.values())]
        number = detectors.first_difference({rank: [_key(*each) for each in zip(mine, known)]
                                   for rank, mine in calls.items()})
        if number is not None:
            yield group, calls, number


def _key(call, knows_which):
    size = call.digest.numel if call.kind in ONE_SIZE else None
    which = call.which if knows_which and call.kind == "all_reduce" else ""
    return call.kind, call.root, size, which


def _stranger(calls, number):
    """(line, ranks) of the call with this number whose line the other ranks never come to, while
    these ranks come to theirs; else None.
    """
    lines = {rank: {call.line for call in each} for rank, each in calls.items()}
    having = {rank: each[number].line for rank, each in calls.items() if len(each) > number}
    for line in sorted(set(having.values())):
        ours = [rank for rank in having if having[rank] == line]
        others = [rank for rank in having if having[rank] != line]
        if others and not any(line in lines[rank] for rank in others) and all(
                having[rank] in lines[us] for rank in others for us in ours):
            return line, ours
    return None


def _by(of, calls, number):
    found = defaultdict(list)
    for rank, each in calls.items():
        if len(each) > number:
            found[of(each[number])].append(rank)
    return found


def _said(call):
    root = "" if call.root is None else f" from rank {call.root}"
    root = root.replace("from", "to") if call.kind == "reduce" else root
    return f"{call.kind} of {call.digest.numel:,} numbers{root}"


def _named(group, ranks):
    members = max((r.groups.get(group, ()) for r in ranks), key=len)
    return f"the group of {rank_names(members)}"


def _of(ranks, number):
    return next(r for r in ranks if r.number == number)


def _waits(rank):
    return bool(rank.waits) or not rank.fate
