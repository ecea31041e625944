"""What a launch tells of ranks that did not all return: who is to blame, and who waits where."""

from ranklab.engine.report import (Failure, HangError, RankError, Stack, Value, describe_exit,
                                   rank_names)


def failure(members):
    """The error of a launch in which a rank raised or died: the first to blame, then the others."""
    died = [m for m in members if m.is_settled() and m.report is None]
    raised = [m for m in members if isinstance(m.report, Failure)]
    raised.sort(key=lambda m: not is_cause(m))
    reasons = {m.rank: _reason(m) for m in died + raised}
    first = (died + raised)[0]
    of = f"rank {first.rank} of {len(members)}"
    if first in died:
        text = f"{of} {describe_exit(first.exit_code, first.stack_text())}"
    else:
        text = f"{of} raised {reasons[first.rank]}\n\n{first.report}".rstrip()
    return RankError(text + _others(first.rank, reasons), first.rank, reasons)


def is_cause(member):
    """True for a rank that failed by itself, and not because another had gone."""
    lost_a_peer = isinstance(member.report, Failure) and member.report.is_lost_peer()
    return member.has_failed() and not lost_a_peer


def _reason(member):
    if member.report is None:
        return describe_exit(member.exit_code)
    return member.report.headline()


def _others(first, reasons):
    """Ranks with the same reason share a line; "lost a connection" is what the first caused."""
    by_reason = {}
    for rank, reason in reasons.items():
        if rank != first:
            same = reason == reasons[first]
            by_reason.setdefault("the same" if same else reason, []).append(rank)
    lines = [f"{rank_names(sorted(ranks))}: {reason}" for reason, ranks in by_reason.items()]
    return "\n\n" + "\n".join(lines) if lines else ""


def hang(members, waiting, timeout):
    """The error of a launch whose time is up, with the place of every rank."""
    names = rank_names(m.rank for m in waiting)
    head = f"{names} of {len(members)} did not finish within {timeout:g} s"
    return HangError(f"{head}\n{whereabouts(members)}", waiting[0].rank)


def whereabouts(members):
    """One line for each rank: finished, or the learner's line and what it waits for."""
    return "\n".join(f"  rank {m.rank}  {_whereabouts(m)}" for m in members)


def _whereabouts(member):
    if isinstance(member.report, Value):
        return f"finished after {member.seconds:.1f} s, and waits to be released"
    if member.is_settled():
        return _reason(member)
    return str(Stack.parse(member.stack_text()))
