"""Looks, for hand-written checks: a look raises a Mistake if an observation is wrong.

    def _trial(fn, ranks):                           # on every rank
        result = fn(..., **ranks.keywords)
        yield partial(expect, result > 0, f"{ranks}: it is {result}", "It counts ranks.")

    on_groups(_trial, fn, ranks=4, grouping=GROUPS[0])

Looks run after all calls, because a rank that stopped early would leave the others waiting.
"""

from functools import partial

from ranklab.checks.exercise import Mistake
from ranklab.checks.prover.observe import ALL, view_of
from ranklab.checks.trial import on_ranks, refuses


def expect(is_so, message, hint):
    """Raise a Mistake unless `is_so`; `message` says what is seen instead."""
    if not is_so:
        raise Mistake(message, hint)


def located(where, look, *args):
    """Return look(*args); prefix the Mistake that it raises with `where`."""
    try:
        return look(*args)
    except Mistake as mistake:
        raise Mistake(f"{where}: {mistake.what}", mistake.hint) from None


def refused(label, call):
    """Return a look at whether call() raises ValueError; it is called now, on all ranks."""
    return partial(expect, refuses(call), f"{label}: no ValueError",
                   "Raise ValueError before training begins, with a message that says what is "
                   "wrong.")


def on_groups(trial, fn, ranks, grouping=ALL):
    """Return the results of the looks of trial(fn, Ranks) that are not None, for each rank.

    grouping  groups of ranks, run side by side; ALL: one group of all ranks, without a name
    Raises: the Mistake of the first look that fails.
    """
    results = on_ranks(_on_rank, trial, fn, grouping, ranks=ranks)
    mistakes = [(number, rank, mistake) for rank, (number, mistake, _) in enumerate(results)
                if mistake]
    if mistakes:
        raise min(mistakes, key=lambda each: each[:2])[2]
    return [notes for *_, notes in results]


def _on_rank(trial, fn, grouping):
    """Return (number of the look that failed, its Mistake or None, notes of looks)."""
    notes = []
    for number, look in enumerate([*trial(fn, view_of(grouping))]):
        try:
            notes += [note for note in [look()] if note is not None]
        except Mistake as mistake:
            return number, mistake, notes
    return 0, None, notes
