"""The error of a launch in which not all ranks returned: which one caused it, where others wait."""

from ranklab.engine.report import (Failure, HangError, RankError, Value, describe_exit,
                                   rank_names)
from ranklab.engine.stack import Stack

LOST = "lost the connection to a rank that had gone"
UNCONNECTED = "Pair is not connected"  # gloo: the peer has gone, or a rank sends to itself
FEW = 8  # up to this many ranks a report has a line for each; above, a line for each place


def failure(handles):
    """Return the error of a launch in which ranks raised or died; the rank that caused it is first.
    """
    died = [h for h in handles if h.is_settled() and h.report is None]
    raised = [h for h in handles if isinstance(h.report, Failure)]
    raised.sort(key=lambda h: (not is_cause(h), UNCONNECTED in h.report.message))
    reasons = {h.rank: _reason(h) for h in died + raised}
    first = (died + raised)[0]
    name = f"rank {first.rank} of {len(handles)}"
    if first in died:
        frame = Stack.parse(first.stack_text()).learner_frame()
        text = f"{name} {reasons[first.rank]}" + (f"\n\n{frame}" if frame else "")
    else:
        verb = "raised" if is_cause(first) else f"{LOST}:"
        text = f"{name} {verb} {reasons[first.rank]}\n\n{first.report}".rstrip()
    others = {h.rank: _reason(h) if is_cause(h) else LOST for h in died + raised if h is not first}
    return RankError(text + _others(others, reasons[first.rank]), first.rank, reasons)


def is_cause(handle):
    """Return True if a rank failed by itself, not because another rank had gone."""
    lost_a_peer = isinstance(handle.report, Failure) and handle.report.is_lost_peer()
    return handle.has_failed() and not lost_a_peer


def _reason(handle):
    if handle.report is not None:
        return handle.report.headline()
    return ": ".join(filter(None, (describe_exit(handle.exit_code), handle.last_words)))


def _others(others, reason_of_first):
    """Write a line for each reason, with all ranks that have it."""
    by_reason = {}
    for rank, reason in others.items():
        key = "the same" if reason == reason_of_first else reason
        by_reason.setdefault(key, []).append(rank)
    lines = [f"{rank_names(sorted(ranks))}: {reason}" for reason, ranks in by_reason.items()]
    return "\n\n" + "\n".join(lines) if lines else ""


def hang(handles, waiting, predicate, asleep=False, note=""):
    """Return the error of a launch in which the ranks `waiting` do not finish; list where all are.

    predicate: what the waiting ranks do: "did not finish within 60 s"
    """
    head = f"{rank_names(h.rank for h in waiting)} of {len(handles)} {predicate}"
    states = {h.rank: _state(h) for h in handles}
    text = "\n".join(filter(None, [head, whereabouts(handles, asleep), note]))
    return HangError(text, waiting[0].rank, states)


def _state(handle):
    """Return the call that the rank waits in, "returned", or "runs"."""
    if handle.is_settled():
        return "returned"
    return Stack.parse(handle.stack_text()).call() or "runs"


def deadlock(handles, waiting, seconds):
    """Return the error of a launch in which the ranks `waiting` wait for each other, or forever."""
    returned = [h.rank for h in handles if h not in waiting]
    wait, have = ("waits", "it has") if len(waiting) == 1 else ("wait", "all have")
    end = "forever" if returned or len(waiting) == 1 else "for each other"
    predicate = f"{wait} {end}: {have} slept in communication for {seconds:g} s"
    if returned:
        verb = "has" if len(returned) == 1 else "have"
        predicate += f", and {rank_names(returned)} {verb} returned"
    return hang(handles, waiting, predicate, asleep=True)


def whereabouts(handles, asleep=False):
    """Write for each rank that it finished, or at which line of the learner's it waits, for what.

    asleep: the ranks have answered that they wait, even if their stacks have no name for it
    """
    states = [_whereabouts(h, asleep) for h in handles]
    groups = {}
    for handle, state in zip(handles, states):
        groups.setdefault(state if len(handles) > FEW else handle.rank, []).append(handle.rank)
    return "\n".join(f"  {rank_names(ranks)}  {states[ranks[0]]}" for ranks in groups.values())


def _whereabouts(handle, asleep):
    if isinstance(handle.report, Value):
        return f"finished after {handle.seconds:.1f} s, and waits to be released"
    if handle.is_settled():
        return _reason(handle)
    return Stack.parse(handle.stack_text()).describe(asleep)
