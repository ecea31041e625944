"""What a check says of an exception, a dead rank or a hang: what is proved, and never a guess.

The `cause` of a Mistake is one text: "RuntimeError: its message", "was killed by SIGABRT: what C++
said", or what each rank does in a hang, in their order: "hang: recv, returned, all_reduce, runs".
A hint is keyed by a regex of the whole of it.
"""

import contextlib
import re

from ranklab.checks.exercise import Mistake
from ranklab.checks.library_guard import LibrarysAnswer
from ranklab.engine.report import rank_names

# The line and the text of the error say all: no hint is added to these.
SLIP = re.compile(r"""
    (Name|UnboundLocal|Import|ModuleNotFound|Syntax|Indentation|Tab|ZeroDivision)Error\b.*
    | AttributeError:\ .*module\ '.*'\ has\ no\ attribute\ .*
    | AttributeError:\ '(list|dict|set|str|Tensor)'\ object\ has\ no\ attribute\ .*
    | IndexError:\ (list|string|range\ object)\ (assignment\ )?index\ out\ of\ range
    | KeyError:\ '.*'
    | TypeError:\ object\ of\ type\ '(int|float|NoneType)'\ has\ no\ len\(\)
    | TypeError:\ unsupported\ operand\ .*:\ '(int|float|str|list|dict|NoneType)'
      \ and\ '(int|float|str|list|dict|NoneType)'
    """, re.X | re.S)
STUCK = "hang: (?!.*runs).*"  # all wait, or have returned
# gloo ends the process: by SIGABRT, and in 4 of 900 runs SIGSEGV was seen.
MISMATCH = r"was killed by SIG(ABRT|SEGV): op\.preamble\.length <= op\.nbytes.*"
MESSAGES = {"send", "isend", "recv", "irecv", "batch_isend_irecv", "wait"}
SEND_FIRST = ("All ranks wait in send: gloo's send returns only when the other side receives. Let "
              "one rank receive first, or start the send, receive, then wait for the send.")
RECEIVE_FIRST = ("All ranks wait in recv, and no rank sends. In a ring with one token, rank 0 must "
                 "send first; otherwise, start the send before the receive.")
TOO_LONG = ("The first number is the message's size in bytes, the second the receiving tensor's. "
            "Both tensors must have the same length and dtype.")


@contextlib.contextmanager
def hinted(failures):
    """Give a Mistake raised inside the block the hint of the first of the `failures` that fits.

    failures: {regex of the whole cause, or of the check's own sentence: hint}; ".*" only where all
              else was seen to go well
    """
    try:
        yield
    except LibrarysAnswer:  # its own hint says it all
        raise
    except Mistake as mistake:
        if not is_slip(mistake.cause):
            mistake.hint = next((hint for pattern, hint in failures.items() if re.fullmatch(
                pattern, mistake.cause or mistake.what, re.S)), mistake.hint)
        raise


def is_slip(cause):
    """Return whether anybody makes this error anywhere: a misspelt name, 1 + None."""
    return bool(SLIP.fullmatch(cause))


def cause_of_hang(states):
    """Write the cause of a hang as one text, for a Mistake.

    states: for each rank the call that it waits in, "returned" or "runs"
    """
    return "hang: " + ", ".join(states.values())


def why_hang(states):
    """Say what the stacks of a hang prove, or "".

    states: as for cause_of_hang()
    """
    ranks_in = {}
    for rank, call in states.items():
        ranks_in.setdefault(call, []).append(rank)
    returned = ranks_in.pop("returned", [])
    if "runs" in ranks_in or not ranks_in:
        return ""
    calls, names = list(ranks_in), rank_names(sorted(sum(ranks_in.values(), [])))
    if returned and MESSAGES.issuperset(calls):
        return (f"{_have(returned)} returned, and {names} still wait{_s(names)} for a message. "
                "Each message must be sent and received. And if you drop the handle of an isend, "
                "its message may be lost.")
    if returned:
        return (f"{_have(returned)} returned, and {names} still wait{_s(names)} in "
                f"{' and '.join(calls)}. All ranks of a group must make that call the same number "
                "of times.")
    if calls in (["send"], ["recv"]):
        return SEND_FIRST if calls == ["send"] else RECEIVE_FIRST
    if len(calls) > 1 and not MESSAGES.intersection(calls):
        where = ", ".join(f"{rank_names(ranks)} in {call}" for call, ranks in ranks_in.items())
        return ("All ranks of a group must make the same calls in the same order. Here the calls "
                f"differ: {where}.")
    return ""


def why_dead(cause):
    """Say what a dead rank's last words prove, or ""."""
    return TOO_LONG if re.fullmatch(MISMATCH, cause) else ""


def _have(ranks):
    return f"{rank_names(ranks).capitalize()} ha{'s' if len(ranks) == 1 else 've'}"


def _s(names):
    return "" if names.startswith("ranks") else "s"
