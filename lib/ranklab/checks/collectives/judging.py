"""What the checks of lab 02 make of it: values first, then bytes and messages."""

from dataclasses import dataclass

import torch

from ranklab.checks import trial
from ranklab.checks.collectives.cases import MARK, Case, observe
from ranklab.checks.exercise import Mistake
from ranklab.checks.handles import all_awaited
from ranklab.checks.trial import rank_name

BACKENDS = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather",
            "scatter", "all_to_all", "barrier"}


@dataclass
class Wrong:
    """A result that is not the right one: what an `explain` looks at, to name the mistake."""

    case: Case
    seen: list  # Seen of each rank
    rank: int
    ranks: int
    where: str
    got: torch.Tensor
    right: torch.Tensor
    times: list  # of "marks" in the right shape: how often each rank is in the sum


def right_on(fn, call, cases, ranks, wanted, explain=None, hint="", per_node=None):
    """`observe`, after each case gave what `wanted(case, ranks)` says; else a Mistake."""
    seen = observe(fn, call, cases, ranks, hint, per_node)
    compare(cases, seen, wanted, explain)
    return seen


def compare(cases, seen, wanted, explain=None):
    """Each case gave the right value on each rank; `explain(Wrong)` may name the mistake first."""
    for case, of_ranks in zip(cases, seen):
        ranks = len(of_ranks)
        for rank, one in enumerate(of_ranks):
            _can_be_judged(one, rank_name(rank, ranks))
        for rank, (one, right) in enumerate(zip(of_ranks, wanted(case, ranks))):
            got, where = one.value, rank_name(rank, ranks)
            _is_its_own(one, where)
            if trial.is_near(got, right):
                continue
            like_right = (got.shape, got.dtype) == (right.shape, right.dtype)
            times = times_in(int(got[0]), ranks) if like_right and case.kind == "marks" else []
            wrong = Wrong(case, of_ranks, rank, ranks, where, got, right, times)
            if explain:
                explain(wrong)
            _say_how(wrong)


def _can_be_judged(one, where):
    if not isinstance(one.value, torch.Tensor):
        what = "None" if one.value is None else f"a {type(one.value).__name__}"
        raise Mistake(f"{where} returns {what}, not a tensor",
                      "Return the result, one tensor; x itself stays as it is.")
    all_awaited(one.missing, where)
    if one.changed:
        raise Mistake(f"x itself is changed on {where}",
                      "Receive and add into a copy of x, or into what arrived. (Where x is cut "
                      "into chunks, these are views of x.)")


def _is_its_own(one, where):
    if one.itself:
        raise Mistake(f"{where} returns x itself, not a new tensor",
                      "Code that writes into the result would write into x: return a copy.")
    if one.overwritten:
        raise Mistake(f"{where}: a later call changed the result of this one",
                      "Make the buffer inside the function, new in each call.")


def _say_how(wrong):
    """A Mistake for what no `explain` has named."""
    if wrong.times:
        raise Mistake(*who_is_missing(wrong))
    hint = ""
    if wrong.got.shape != wrong.right.shape:
        hint = ("Compare with the docstring's first line. (When R does not divide the length, "
                "tensor_split says how long each chunk is.)")
    elif wrong.got.dtype != wrong.right.dtype:
        hint = "Make every buffer with empty_like or new_empty: same type, same device."
    elif wrong.case.strided:
        hint = ("x is not contiguous here. torch.empty_like(x) keeps its strides, and then chunks "
                "are copies: x.new_empty(x.shape) is contiguous.")
    trial.explain(f"{wrong.where}: the result ({wrong.case})", wrong.got, wrong.right, hint=hint)


def explain_mean(wrong):
    """The mean is named, whatever rounding did to it."""
    got, right, ranks = wrong.got, wrong.right, wrong.ranks
    if got.shape == right.shape and right.numel() and ranks > 1 and bool(
            ((got.double() * ranks - right.double()).abs() < ranks).all()):
        raise Mistake(f"{wrong.where} has the mean, not the sum",
                      "Do not divide by R: code that wants the mean does it afterwards.")


def times_in(value, ranks):
    """How often each rank is in a sum of marks."""
    return [value // MARK**r % MARK for r in range(ranks)]


def who_is_missing(wrong):
    """(what, hint) for a sum of marks: which ranks are in it, and how often."""
    present = [r for r, n in enumerate(wrong.times) if n]
    missing = [r for r, n in enumerate(wrong.times) if not n]
    doubled = _names([r for r, n in enumerate(wrong.times) if n > 1])
    what = f"the sum on {wrong.where}"
    if not missing:
        return (f"{what} counts {doubled} more than once",
                "Something is added twice: one step too many, or a partner that has it already.")
    if doubled:
        return (f"{what} lacks {_names(missing)}, and counts {doubled} more than once",
                "What arrives needs a place of its own: do you receive into the tensor that you "
                "send, or that you add to?")
    holds = f"{_names(present)} only" if present else "no rank's number"
    return (f"{what} lacks {_names(missing)}: it holds {holds}",
            "Either there are too few steps, or what arrived is passed on without your own share, "
            "or it is thrown away.")


def _names(ranks):
    return ranks and f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def ranks_agree(seen, hint="Let one rank finish a chunk and send the finished chunk to the others, "
                           "or replicas drift apart."):
    """All ranks hold the same bits, whatever the order of the sum was."""
    for rank, one in enumerate(seen):
        if not torch.equal(one.value, seen[0].value):
            raise Mistake(f"rank {rank} and rank 0 differ in the last bits of the sum",
                          f"Each rank adds in another order. {hint}")


def no_backend(seen):
    """Only sends and receives were used, not the collective that is to be built."""
    for one in seen:
        for name in BACKENDS & set(one.calls):
            raise Mistake(f"it calls the backend's own {name}",
                          "Here the verb itself is built: from sendrecv, send and recv only.")


def nothing_sent(cases, seen):
    """When x is empty."""
    for case, of_ranks in zip(cases, seen):
        if not case.n and any(one.messages for one in of_ranks):
            raise Mistake("an empty x is sent", "Nothing at all is sent when x is empty: every "
                          "rank knows that there is nothing to come, and a message costs its "
                          "latency.")


def sends(seen, wanted, hint, nbytes=192):
    """Each rank sends its `wanted` (bytes, messages). x, of `nbytes`, is told to have 100 MB."""
    for rank, (one, (sent, messages)) in enumerate(zip(seen, wanted)):
        where = rank_name(rank, len(seen))
        if one.sent != sent:
            each = "each rank" if len({one.sent for one in seen}) == len({*wanted}) == 1 else where
            raise Mistake(f"{each} sends {100 * one.sent / nbytes:.1f} MB of a 100 MB tensor; "
                          f"{100 * sent / nbytes:.1f} MB is enough", hint)
        if one.messages != messages:
            raise Mistake(f"{where} sends {one.messages} messages; {messages} are enough",
                          "One message a step: what a step sends goes in one piece, as each "
                          "message costs its latency.")
