"""How a check runs the learner's code on ranks: a trial in groups, beside the same in one process.

    def _trial(fn, ranks):                                   # on every rank, for each group
        def call(turn): ...                                  # -> {name: tensor}
        def right(turn): ...                                 # -> {name: [tensor of each member]}
        yield from beside(f"{ranks}", ranks, call, right)

    on_groups(_trial, fn, failures={LEFT: "..."})

A trial yields looks: functions that raise a Mistake. They run when all is done, because a rank
that stopped early would let the others wait.
"""

from functools import partial

import torch
import torch.distributed as dist

from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted
from ranklab.checks.handles import Waits, all_awaited
from ranklab.checks.library_guard import LibrarysAnswer
from ranklab.checks.prover.observe import Ranks
from ranklab.checks.trial import explain, on_ranks, refuses
from ranklab.engine import device
from ranklab.meter import Traffic

# All four ranks first. Then groups of one and three, whose ranks are not 0 .. n-1, and of two.
GROUPINGS = ((0, 1, 2, 3),), ((0,), (1, 2, 3)), ((0, 2), (1, 3))
GROUP = ("Pass `group` on to every collective, to get_rank and to get_world_size. A rank in an "
         "argument counts inside the group: group_src, group_dst.")
OUTSIDE = {"ValueError: .*is not part of group.*": GROUP}  # it was taken for a number of all ranks
KEPT = "Something is kept from another call: make buffers inside the function, new in each call."
IN_GROUPS = GROUPINGS[1:2]  # where all ranks were looked at before
TURNS = 0, 1


def on_groups(trial, fn, *args, failures=None, ranks=4, groupings=None, at_once=False,
              group_hint=GROUP, **launch):
    """All looks of trial(fn, Ranks, *args) hold; returns what they return, for each rank.

    failures   {regex of the cause, or of a look's sentence: hint}
    groupings  by default GROUPINGS of 4 ranks, in one launch; of another number all ranks alone
    at_once    each look runs when it is yielded, and all ranks end with the first that fails: what
               comes after would not work. Costs an all-reduce each
    error      the Mistake of the first look that fails; it gets `group_hint`, too, if it is one of
               a group of fewer ranks, and as many ranks alone make none
    """
    groupings = groupings or (GROUPINGS if ranks == 4 else (_alone(ranks),))
    with hinted((failures or {}) | OUTSIDE):
        seen = on_ranks(_on_rank, trial, fn, args, groupings, at_once, ranks=ranks, **launch)
        found = [(number, rank) for rank, (number, mistake, *_) in enumerate(seen) if mistake]
        if found:
            _, mistake, size, _ = seen[min(found)[1]]
            if group_hint and size < ranks and _is_right(trial, fn, args, size, at_once, launch):
                mistake.hint = f"{group_hint} {mistake.hint}".strip()
            raise mistake
    return [notes for *_, notes in seen]


def _alone(ranks):
    return (tuple(range(ranks)),)


def _is_right(trial, fn, args, ranks, at_once, launch):
    """Return whether all looks hold on so many ranks that are all there are."""
    try:
        seen = on_ranks(_on_rank, trial, fn, args, (_alone(ranks),), at_once, ranks=ranks, **launch)
    except Mistake:
        return False
    return not any(mistake for _, mistake, *_ in seen)


def _on_rank(trial, fn, args, groupings, at_once):
    """(number of the look that failed, its Mistake or None, size of its group, notes of looks)"""
    cases, notes = [], []
    for side_by_side in groupings:
        whole = side_by_side == (tuple(range(dist.get_world_size())),)
        made = [None if whole else dist.new_group(members) for members in side_by_side]
        cases += [Ranks(*both) for both in zip(side_by_side, made) if dist.get_rank() in both[0]]
    looks = _looks(trial, fn, args, cases)
    for number, (ranks, look) in enumerate(looks if at_once else list(looks)):
        if isinstance(look, Mistake):
            return number, look, ranks.size, notes
        mistake = None
        try:
            notes += [note for note in [look()] if note is not None]
        except Mistake as found:
            mistake = found
        if (_fails_anywhere(mistake) if at_once else mistake):
            return number, mistake, ranks.size, notes
    return 0, None, 0, notes


def _looks(trial, fn, args, cases):
    """(Ranks, look) of all cases; a Mistake that a trial raises, on all ranks alike, ends them."""
    for ranks in cases:
        try:
            yield from ((ranks, look) for look in trial(fn, ranks, *args))
        except LibrarysAnswer:  # some ranks may have met it alone: the others don't wait for them
            raise
        except Mistake as mistake:
            yield ranks, mistake


def _fails_anywhere(mistake):
    failed = torch.tensor(float(mistake is not None), device=device())
    dist.all_reduce(failed)
    return bool(failed)


def located(where, look, *args):
    """look(*args); the Mistake that it raises begins with `where`."""
    try:
        return look(*args)
    except Mistake as mistake:
        raise Mistake(f"{where}: {mistake.what}", mistake.hint) from None


def refused(what, call):
    """A look at whether call() is a ValueError; it is called now, on all ranks."""
    return partial(expect, refuses(call), f"{what}: no ValueError", "Refuse it before training "
                   "begins, with a sentence that says what is wrong.")


def expect(is_so, what, hint):
    """A Mistake unless it is so; `what` says what is seen instead."""
    if not is_so:
        raise Mistake(what, hint)


def beside(where, ranks, call, right, *, own=None, slips=None, advice=None, sends=None,
           **on_the_way):
    """Looks at call(0) and call(1), where right(0) and right(1) are what one process gets.

    call   turn -> {name: tensor} on this rank: results, and the inputs, which are to stay as they
           were. Only the learner's code communicates in it
    right  turn -> {name: [the tensor of each member of the group]}
    own    turn -> {name: what this rank had before}, so that a result that is its own is named
    slips  (name, turn) -> {what a mistake gets: (tensor, hint)}. They are looked for before the
           usual ones: its own, zeros, R or 1/R times right, another rank's, the other turn's
    advice  name -> the hint for all else
    sends  (calls, bytes) of one call at most, as this rank gives them to collectives or sends
    on_the_way  through, roundings: see is_near()
    """
    values, seen = [], []
    for turn in TURNS:
        with Traffic() as traffic, Waits() as waits:
            values.append(call(turn))
        seen.append((traffic.ops, waits.missing(sum(traffic.calls.values()))))
    values = [{name: _on_cpu(value) for name, value in each.items()} for each in values]
    rights, owns = [right(turn) for turn in TURNS], [own(turn) if own else {} for turn in TURNS]
    for turn in TURNS:
        yield partial(all_awaited, seen[turn][1], where)
        for name in rights[turn]:
            named = (slips(name, turn) if slips else {}) | _usual(name, turn, ranks, rights, owns)
            hint = advice(name) if advice else ""
            yield partial(_is, f"{where}: {name}", values[turn].get(name),
                          rights[turn][name][ranks.index], named, hint, **on_the_way)
    if sends:
        yield partial(_sends, where, seen[0][0], *sends)


def _usual(name, turn, ranks, rights, owns):
    R, of_ranks = ranks.size, rights[turn][name]
    right, other = of_ranks[ranks.index], rights[1 - turn].get(name)
    named = {}
    if (own := owns[turn].get(name)) is not None:
        named["still this rank's own"] = own, "Nothing from the other ranks has come into it."
    if isinstance(right, torch.Tensor) and right.is_floating_point():
        named |= {f"{R} times what is right": (
            R * right, "It is a sum instead of the mean, or it has each share more than once."),
                  f"1/{R} of what is right": (right / R, "It is a mean instead of the sum, or "
                                              "divided twice.")}
        if ranks.group:
            named["divided by the number of all ranks"] = right * R / dist.get_world_size(), ""
    if isinstance(right, torch.Tensor):
        named["zeros"] = torch.zeros_like(right), "Nothing was written there."
    named |= {f"what rank {member} must have": (value, "It belongs to another rank of the group.")
              for member, value in zip(ranks.members, of_ranks) if value is not right}
    if other:
        named[f"that of the {('second', 'first')[turn]} call"] = other[ranks.index], KEPT
    return named


def _is(where, got, right, slips, hint, **on_the_way):
    """None is right where `right` is None."""
    if right is None:
        return expect(got is None, f"{where} is there", hint)
    slips = {what: (_on_cpu(wrong), advice) for what, (wrong, advice) in slips.items()}
    return explain(where, got, _on_cpu(right), slips, hint, **on_the_way)


def _on_cpu(value):
    """A copy: the next group's calls may write into what is kept between calls."""
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _sends(where, ops, calls, nbytes):
    sent, names = sum(op.payload_bytes for op in ops), ", ".join(sorted({op.name for op in ops}))
    expect(len(ops) <= calls and sent <= nbytes, f"{where} sends {sent:,} bytes in {len(ops)} calls"
           f" ({names}); {nbytes:,} bytes in {calls} are enough", "Each call costs its latency, "
           "so send what is needed once, and nothing else.")
