"""What a launch says when not all ranks returned: which is to blame, and where the others wait."""

from ranklab.engine.report import (Failure, HangError, RankError, Value, describe_exit,
                                   rank_names)
from ranklab.engine.stack import Stack

LOST = "lost the connection to a rank that had gone"
FEW = 8  # ranks; up to here a report has a line for each, beyond it one for each place


def failure(members):
    """The error of a launch in which a rank raised or died: the first to blame, then the others."""
    died = [m for m in members if m.is_settled() and m.report is None]
    raised = [m for m in members if isinstance(m.report, Failure)]
    raised.sort(key=lambda m: not is_cause(m))
    reasons = {m.rank: _reason(m) for m in died + raised}
    first = (died + raised)[0]
    of = f"rank {first.rank} of {len(members)}"
    if first in died:
        own = Stack.parse(first.stack_text()).own()
        text = f"{of} {reasons[first.rank]}" + (f"\n\n{own}" if own else "")
    else:
        verb = "raised" if is_cause(first) else f"{LOST}:"
        text = f"{of} {verb} {reasons[first.rank]}\n\n{first.report}".rstrip()
    others = {m.rank: _reason(m) if is_cause(m) else LOST for m in died + raised if m is not first}
    return RankError(text + _others(others, reasons[first.rank]), first.rank, reasons)


def is_cause(member):
    """True for a rank that failed by itself, and not because another had gone."""
    lost_a_peer = isinstance(member.report, Failure) and member.report.is_lost_peer()
    return member.has_failed() and not lost_a_peer


def _reason(member):
    if member.report is None:
        return describe_exit(member.exit_code)
    return member.report.headline()


def _others(others, reason_of_first):
    """Ranks with the same reason share a line."""
    by_reason = {}
    for rank, reason in others.items():
        same = reason == reason_of_first
        by_reason.setdefault("the same" if same else reason, []).append(rank)
    lines = [f"{rank_names(sorted(ranks))}: {reason}" for reason, ranks in by_reason.items()]
    return "\n\n" + "\n".join(lines) if lines else ""


def hang(members, waiting, what):
    """The error of a launch whose ranks `waiting` don't end, with the place of every rank."""
    head = f"{rank_names(m.rank for m in waiting)} of {len(members)} {what}"
    return HangError(f"{head}\n{whereabouts(members)}", waiting[0].rank)


def whereabouts(members):
    """For each rank: finished, or the learner's line and what it waits for."""
    states = [_whereabouts(m) for m in members]
    groups = {}
    for member, state in zip(members, states):
        groups.setdefault(state if len(members) > FEW else member.rank, []).append(member.rank)
    return "\n".join(f"  {rank_names(ranks)}  {states[ranks[0]]}" for ranks in groups.values())


def _whereabouts(member):
    if isinstance(member.report, Value):
        return f"finished after {member.seconds:.1f} s, and waits to be released"
    if member.is_settled():
        return _reason(member)
    return str(Stack.parse(member.stack_text()))
