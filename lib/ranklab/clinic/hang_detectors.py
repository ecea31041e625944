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
        if not _call_of_some(calls, number):
            callers = defaultdict(list)
            for rank, rank_calls in calls.items():
                if len(rank_calls) > number:
                    call = rank_calls[number]
                    callers[f"{_describe(call)} at {call.line}"].append(rank)
            text = "; ".join(f"{rank_names(members)}: {call}" for call, members in callers.items())
            return (f"call {number} in {_group_name(group, ranks)} is not the same on its ranks: "
                    f"{text}")
    return None


def rank_branch(ranks):
    """A rank makes a call that others don't make."""
    for group, calls, number in _differences(ranks):
        if branch := _call_of_some(calls, number):
            line, callers = branch
            others = [rank for rank in calls if rank not in callers]
            return (f"{rank_names(callers)} of {_group_name(group, ranks)} came to {line}, "
                    f"{rank_names(others)} never did: call {number} of the group is "
                    f"{_describe(calls[callers[0]][number])} there and "
                    f"{_describe(calls[others[0]][number])} elsewhere")
    for group, calls in _groups(ranks).items():
        counts = {rank: len(rank_calls) for rank, rank_calls in calls.items()}
        largest = max(counts.values())
        failed = [rank for rank in calls if _by_number(ranks, rank).fate.startswith("raised")]
        waiting = [rank for rank in calls if counts[rank] == largest
                   and (rank in failed or _waits(_by_number(ranks, rank)))]
        early = [rank for rank in calls if counts[rank] < largest
                 and _by_number(ranks, rank).fate == "returned"]
        if early and waiting:
            last = calls[waiting[0]][-1]
            verb = "raised" if waiting[0] in failed else f"wait{'s' * (len(waiting) == 1)}"
            return (f"{rank_names(waiting)} {verb} in call {largest} of "
                    f"{_group_name(group, ranks)}, {last.kind} at {last.line}; "
                    f"{rank_names(early)} returned after "
                    f"{min(counts[rank] for rank in early)} calls")
    return None


def communicator_order(ranks):
    """Ranks wait for each other in different groups."""
    last = {r.number: collectives[-1] for r in ranks if _waits(r)
            and (collectives := [call for call in r.calls if call.number >= 0])}
    waits = {}
    for number, call in last.items():
        members = _by_number(ranks, number).groups.get(call.group, ())
        waits[number] = {r.number for r in ranks if r.number in members and not any(
            other.group == call.group and other.number >= call.number for other in r.calls)}
    circle = detectors.circle_of_waits(waits)
    if len({last[rank].group for rank in circle}) < 2:
        return None
    parts = [f"rank {rank} waits for rank {circle[(i + 1) % len(circle)]} in {last[rank].kind} of "
             f"{_group_name(last[rank].group, ranks)} at {last[rank].line}"
             for i, rank in enumerate(circle)]
    return "; ".join(parts)


def sync_every_micro_step(ranks):
    """Gradients are all-reduced after each backward of a step, not once."""
    accumulated, all_steps = [], sum(len(rank.steps) for rank in ranks)
    for rank in ranks:
        for step in rank.steps:
            total = sum(digest.numel for digest in step.final if digest)
            reduced = Counter()  # backward -> numbers
            for call in rank.calls:
                if call.step == step.number and call.kind == "all_reduce" and (
                        call.in_backward or call.tensor.startswith("gradient")):
                    reduced[call.backwards + call.in_backward] += call.digest.numel
            if step.backwards > 1 and total:
                is_sick = all(abs(reduced[i] - total) < 0.01 * total
                              for i in range(1, step.backwards + 1))
                accumulated.append((step.backwards, total, is_sick))
    if 2 * len(accumulated) <= all_steps or (
            sum(is_sick for *_, is_sick in accumulated) < 0.8 * len(accumulated)):
        return None
    times, total, _ = max(accumulated)
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
    """Say of each rank that did not return, in a line, where it waits, and after which calls; or
    that it has left nothing.
    """
    lines = []
    for r in ranks:
        if r.fate != "returned":
            last = next((call for call in reversed(r.calls) if call.number >= 0), None)
            call = (f"last called {last.kind}, call {last.number} of "
                    f"{_group_name(last.group, ranks)}, at {last.line}" if last
                    else "made no call")
            waits = f"; waits at {r.waits}" if r.waits else ""
            lines.append(f"rank {r.number} {call}{waits}; {r.fate or _process_state(r)}")
    members = {number for r in ranks for numbers in r.groups.values() for number in numbers}
    missing = members - {r.number for r in ranks}
    return lines + [f"{rank_names(sorted(missing))} left nothing here"] * bool(missing)


def _process_state(rank):
    """Say what the rank's process does, or that there is none; no other host can tell."""
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
        knows_tensor = [is_one and all(call.tensor for call in turn if call)
                       for turn in itertools.zip_longest(*calls.values())]
        number = detectors.first_difference({
            rank: list(map(_key, rank_calls, knows_tensor)) for rank, rank_calls in calls.items()})
        if number is not None:
            yield group, calls, number


def _key(call, knows_tensor):
    size = call.digest.numel if call.kind in ONE_SIZE else None
    tensor = call.tensor if knows_tensor and call.kind == "all_reduce" else ""
    return call.kind, call.root, size, tensor


def _call_of_some(calls, number):
    """(line, its ranks) of the call with this number whose line the other ranks never come to,
    while these ranks come to the lines of the others; else None.
    """
    lines = {rank: {call.line for call in rank_calls} for rank, rank_calls in calls.items()}
    line_of = {rank: rank_calls[number].line for rank, rank_calls in calls.items()
               if len(rank_calls) > number}
    for line in sorted(set(line_of.values())):
        callers = [rank for rank in line_of if line_of[rank] == line]
        others = [rank for rank in line_of if line_of[rank] != line]
        if others and not any(line in lines[rank] for rank in others) and all(
                line_of[rank] in lines[caller] for rank in others for caller in callers):
            return line, callers
    return None


def _describe(call):
    root = "" if call.root is None else f" from rank {call.root}"
    root = root.replace("from", "to") if call.kind == "reduce" else root
    return f"{call.kind} of {call.digest.numel:,} numbers{root}"


def _group_name(group, ranks):
    members = max((r.groups.get(group, ()) for r in ranks), key=len)
    return f"the group of {rank_names(members)}"


def _by_number(ranks, number):
    return next(r for r in ranks if r.number == number)


def _waits(rank):
    return bool(rank.waits) or not rank.fate
