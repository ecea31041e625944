"""Detectors of hangs and slowdowns (slow ranks are judged as in resilience).

A detector takes the Ranks of a run (trace.py); it returns its evidence, a sentence, or None.
"""

import contextlib
import itertools
import re
import socket
from collections import Counter, defaultdict

import psutil
import torch

from ranklab.clinic import detectors
from ranklab.clinic.replicas import repeats_a_batch, replicas
from ranklab.engine.report import rank_names
from ranklab.resilience.straggler import find_straggler

ONE_SIZE = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather_into_tensor")
LIMIT = re.compile("[Tt]imed out|[Tt]imeout")
SLOW = 1.5  # times the median work in a step
LEAST = 100  # MFLOP in a step: with less work, launching the ops takes most of the time


def collective_order(ranks):
    """Find a group whose ranks make the same calls in different orders."""
    for group, calls, number in _differences(ranks):
        if not _call_of_some(calls, number):
            callers = defaultdict(list)
            for rank, rank_calls in calls.items():
                if len(rank_calls) > number:
                    call = rank_calls[number]
                    tensor = _tensor_name(call, _by_number(ranks, rank))
                    callers[f"{_describe(call)}{tensor} at {call.line}"].append(rank)
            text = "; ".join(f"{rank_names(members)}: {call}" for call, members in callers.items())
            return (f"call {number} in {_group_name(group, ranks)} is not the same on its ranks: "
                    f"{text}")
    return _other_parameters(ranks) or _other_words(ranks)


def _other_parameters(ranks):
    """Find ranks with the same gradients whose parameters are in different orders."""
    for group in replicas(ranks):
        a, b = group[0].steps[0], group[1].steps[0]
        if a.names != b.names and sorted(a.names) == sorted(b.names) and all(a.names):
            place = next(i for i, (x, y) in enumerate(zip(a.names, b.names)) if x != y)
            return (f"the ranks have their parameters in different orders: the gradient of "
                    f"{a.names[place]} on rank {group[0].number} is added to that of "
                    f"{b.names[place]} on rank {group[1].number}")
    return None


def _other_words(ranks):
    """Find a line that reduces several things in turn, in a different order on each rank."""
    for group, calls in _groups(ranks).items():
        by_line = defaultdict(list)
        for turn in zip(*calls.values()):
            lines = {call.line for call in turn}
            if len(lines) == 1 and all("reduce" in call.kind for call in turn):
                by_line[lines.pop()].append(turn)
        for line, turns in by_line.items():
            for name in turns[0][0].words:
                words = [[call.words.get(name) for call in calls_of] for calls_of in zip(*turns)]
                index = next((i for i, each in enumerate(zip(*words)) if len(set(each)) > 1), None)
                if index is not None and len({str(sorted(map(str, each))) for each in words}) == 1:
                    text = ", ".join(f"{each[index]!r} on rank {rank}"
                                     for rank, each in zip(calls, words))
                    return (f"in call {turns[index][0].number} of {_group_name(group, ranks)}, "
                            f"{turns[index][0].kind} at {line}, `{name}` is {text}: the ranks go "
                            "through the same things in different orders")
    return None


def rank_branch(ranks):
    """Find a call that some ranks of a group make and others do not."""
    for group, calls, number in _differences(ranks):
        if branch := _call_of_some(calls, number):
            line, callers = branch
            rest = [rank for rank in calls if rank not in callers]
            call, peer_call = calls[callers[0]][number], calls[rest[0]][number]
            return (f"in step {call.step} {rank_names(callers)} of {_group_name(group, ranks)} "
                    f"came to {line}, {rank_names(rest)} did not: call {number} of the group is "
                    f"{_describe(call)} there and {_describe(peer_call)} elsewhere")
    for group, calls in _groups(ranks).items():
        if evidence := _fewer_calls(ranks, group, calls):
            return evidence
    return None


def _fewer_calls(ranks, group, calls):
    """Return the evidence that ranks wait, or waited, in a call that others of the group did not
    reach.
    """
    by_number = {rank: _by_number(ranks, rank) for rank in calls}
    largest = max(map(len, calls.values()))
    failed = [rank for rank in calls if by_number[rank].fate.startswith("raised")]
    waiting = [rank for rank in calls if len(calls[rank]) == largest
               and (rank in failed or _waits(by_number[rank]))]
    fewer = [rank for rank in calls if len(calls[rank]) < largest]
    if not (waiting and fewer):
        return None
    last = calls[waiting[0]][-1]
    place = f"{last.number} of {_group_name(group, ranks)}, {last.kind} at {last.line}"
    if early := [rank for rank in fewer if by_number[rank].fate == "returned"]:
        verb = "raised" if waiting[0] in failed else f"wait{'s' * (len(waiting) == 1)}"
        return (f"{rank_names(waiting)} {verb} in call {place}; {rank_names(early)} returned after "
                f"{min(len(calls[rank]) for rank in early)} calls")
    elsewhere = [rank for rank in fewer if not by_number[rank].waits]
    skip = _skipped_batch(ranks, elsewhere, waiting)
    if not elsewhere or not (skip or any(LIMIT.search(by_number[rank].fate) for rank in failed)):
        return None
    text = "; ".join(f"rank {rank} made {len(calls[rank])} calls there, the last at "
                     f"{calls[rank][-1].line if calls[rank] else '?'}" for rank in elsewhere)
    return (f"{rank_names(waiting)} came to call {place}; {text}, and did not come: "
            + (skip or "it has left the loop, or is late"))


def _skipped_batch(ranks, late, waiting):
    """Return the step in which a late rank had one more batch than the others and skipped it."""
    for rank in late:
        record, records = _by_number(ranks, rank), [_by_number(ranks, number) for number in waiting]
        for steps in zip(record.steps, *(peer.steps for peer in records)):
            batches = [len(step.rows) for step in steps]
            if batches[0] > max(batches[1:]) and (
                    steps[0].backwards == max(step.backwards for step in steps[1:])):
                return (f"before step {steps[0].number} rank {rank} had {batches[0]} batches and "
                        f"{steps[0].backwards} backward(s), {rank_names(waiting)} had "
                        f"{max(batches[1:])} and as many")
    return None


def communicator_order(ranks):
    """Find ranks that wait for each other in different groups."""
    last, waits = waits_of(ranks)
    circle = detectors.circle_of_waits(waits)
    if len({last[rank].group for rank in circle}) < 2 or any(
            last[rank].number < 0 for rank in circle):
        return None
    parts = [f"rank {rank} waits for rank {circle[(i + 1) % len(circle)]} in {last[rank].kind} of "
             f"{_group_name(last[rank].group, ranks)} at {last[rank].line}"
             for i, rank in enumerate(circle)]
    return "; ".join(parts)


def message_circle(ranks):
    """Find ranks that wait for each other in a circle, at least one of them in a message."""
    last, waits = waits_of(ranks)
    circle = detectors.circle_of_waits(waits)
    if not any(last[rank].number < 0 for rank in circle):
        return None
    return "; ".join(f"rank {rank} waits for rank {circle[(i + 1) % len(circle)]} in its "
                     f"{last[rank].kind} at {last[rank].line}" for i, rank in enumerate(circle))


def waits_of(ranks):
    """Return ({rank: its last call}, {rank: ranks that it waits for}) for the waiting ranks.

    A collective waits for the ranks that have not begun it, a message for its other end.
    """
    last = {r.number: r.calls[-1] for r in ranks if _waits(r) and r.calls}
    waits = {}
    for number, call in last.items():
        if call.number < 0:
            reverse = {"send": "recv", "recv": "send"}[call.kind]
            count = sum((each.kind, each.root) == (call.kind, call.root)
                        for each in _by_number(ranks, number).calls)
            answers = sum(each.kind == reverse and each.root == number for r in ranks
                          if r.number == call.root for each in r.calls)
            waits[number] = {call.root} if answers < count else set()
        else:
            members = _by_number(ranks, number).groups.get(call.group, ())
            waits[number] = {r.number for r in ranks if r.number in members and not any(
                each.group == call.group and each.number >= call.number for each in r.calls)}
    return last, waits


def is_stuck(ranks):
    """Return whether no rank can go on: ranks wait in a circle, or for one that has returned."""
    _, waits = waits_of(ranks)
    numbers = {r.number for r in ranks if r.fate == "returned"}
    return bool(detectors.circle_of_waits(waits)) or any(numbers & each for each in waits.values())


def sync_every_micro_step(ranks):
    """Find steps that all-reduce the gradients after each backward instead of once."""
    accumulated, all_steps = [], sum(len(rank.steps) for rank in ranks)
    for rank in ranks:
        for step in rank.steps:
            total = sum(digest.numel for digest in step.final if digest)
            reduced = Counter()  # backward -> numbers
            for call in rank.calls:
                if call.step == step.number and call.kind == "all_reduce" and (
                        call.in_backward or call.tensor.startswith("gradient")):
                    reduced[call.backwards + call.in_backward] += call.digest.numel
            if step.backwards > 1 and total and len({*step.begins}) == 1 and (
                    not repeats_a_batch(step)):
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
    """Find a rank that has more work in a step than the others, which wait for it.

    Work is counted, not timed, because on a busy machine a healthy rank is slow as well. So a rank
    that is slow for a different reason (its card, its loader) is not found; find_straggler in lab
    14 finds it.
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
    least, most = (f"{number:,.0f}" for number in (rest.min(), rest.max()))
    others = f"the others {least} to {most}" if least != most else (
        f"the other{'s' * (len(rest) > 1)} {most}")
    return (f"rank {alike[slow[0]].number} computes {usual[slow[0]]:,.0f} MFLOP in a step, "
            f"{others} (median of {len(flops)} steps)")


DETECTORS = {each.__name__: each for each in (
    collective_order, rank_branch, communicator_order, message_circle, sync_every_micro_step,
    straggler)}
# These look at a whole run at once.
WHOLE = "collective_order", "rank_branch", "communicator_order", "message_circle"


def whereabouts(ranks):
    """Report where each rank that did not return waits, and after which calls.

    Returns: a line for each of these ranks, and one for the ranks without a record.
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
    """Describe the state of the rank's process, if there is one; only its own host knows."""
    if not rank.process or rank.process[0] != socket.gethostname():
        return "it runs, or was killed"
    with contextlib.suppress(psutil.Error):
        if process := process_of(rank):
            return "it is stopped" if process.status() == psutil.STATUS_STOPPED else "it runs"
    return "it was killed"


def process_of(rank):
    """Return the rank's process on this host, or None if it has ended."""
    host, number, start = rank.process or ("", 0, 0)
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(number) if host == socket.gethostname() else None
        if process and process.create_time() == start and (
                process.status() != psutil.STATUS_ZOMBIE):
            return process
    return None


def has_difference(ranks):
    """Return whether all ranks wait, and the ranks of some group made different calls."""
    return all(map(_waits, ranks)) and any(True for _ in _differences(ranks))


# --- groups and their calls -----------------------------------------------------------------------

def _groups(ranks):
    """Return {group: {rank: its calls there, from a number that all ranks have}}."""
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
    """Yield (group, calls, number of the first call that differs), if one differs in the group."""
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
    size = call.digest.numel if call.kind in ONE_SIZE else None  # the same on all ranks
    tensor = call.tensor if knows_tensor and call.kind == "all_reduce" else ""
    return call.kind, call.root, size, tensor


def _call_of_some(calls, number):
    """Return (line, its ranks) of the call with this number that the other ranks skipped; or None.

    The others never reach its line, although its ranks reach the lines of the others. Or the others
    have passed it: in their last step they reached it before the line where they are now.
    """
    line_of = {rank: rank_calls[number].line for rank, rank_calls in calls.items()
               if len(rank_calls) > number}
    sides = [(line, [rank for rank in line_of if line_of[rank] == line],
              [rank for rank in line_of if line_of[rank] != line])
             for line in sorted(set(line_of.values()))]
    for line, callers, rest in sides:
        if rest and all(_has_passed(calls[rank][:number + 1], line) for rank in rest):
            return line, callers
    lines = {rank: {call.line for call in rank_calls} for rank, rank_calls in calls.items()}
    for line, callers, rest in sides:
        if rest and not any(line in lines[rank] for rank in rest) and all(
                line_of[rank] in lines[caller] for rank in rest for caller in callers):
            return line, callers
    return None


def _has_passed(rank_calls, line):
    """Return whether the last call followed a call at this line a step ago, and now does not."""
    *earlier, last = rank_calls
    lines = [call.line for call in earlier]
    if last.line not in lines or line not in lines:
        return False
    before = len(lines) - 1 - lines[::-1].index(last.line)  # its last visit to this line
    return line in lines[:before] and line not in lines[before:] and any(
        call.step < last.step for call in earlier if call.line == line)


def _describe(call):
    root = "" if call.root is None else f" from rank {call.root}"
    root = root.replace("from", "to") if call.kind == "reduce" else root
    return f"{call.kind} of {call.digest.numel:,} numbers{root}"


def _tensor_name(call, rank):
    """Return " (gradient of NAME)" if the call's input is a parameter or its gradient, else ""."""
    kind, _, place = call.tensor.partition(" ")
    names = rank.steps[0].names if len({step.optimizer for step in rank.steps}) == 1 else []
    known = names[int(place)] if place and int(place) < len(names) else ""
    return (f" ({kind} of {known})" if known else f" ({call.tensor})") if kind else ""


def _group_name(group, ranks):
    sizes = {}  # of all groups, in the order in which ranks have used them
    for r in ranks:
        sizes |= {name: members for name, members in r.groups.items()
                  if len(members) > len(sizes.get(name, ()))}
    members = sizes.get(group, ())
    alike = [name for name, each in sizes.items() if each == members]
    number = f" (number {alike.index(group) + 1} of {len(alike)})" if len(alike) > 1 else ""
    return f"the group of {rank_names(members)}{number}"


def _by_number(ranks, number):
    return next(r for r in ranks if r.number == number)


def _waits(rank):
    return bool(rank.waits) or not rank.fate
