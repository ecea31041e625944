"""The check of ZeroStage3: equal to one process; gathered, used and freed at the right time."""

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import hinted, is_near, on_ranks, rank_name
from ranklab.checks.zero.stages import IN_GROUPS, LIMIT, WAITS, in_groups
from ranklab.checks.zero.toys import ADAMW
from ranklab.checks.zero.training import (
    compare_halves, compare_training, train, train_halves,
)
from ranklab.checks.zero.watching import BLOCKS, watch

GRADIENT = ("backward_done() reduces the unit's gradients where self.sync is True, when all of "
            "them are there: call_after_backward(). A unit that is used twice comes there twice.")
FAILURES = {
    "got no gradient": GRADIENT,
    "forward begins without": "enter() gathers the unit, and waits: unit.end_gather().",
    "backward begins without": "leave() frees the unit after its forward, so each output that "
    "requires a gradient needs a hook, backward_of(), which gathers it again: unit.end_gather().",
    "once more begins without": "A checkpoint runs the forward once more inside the backward: "
    "enter() must gather there, too.",
    "storage of size 0": "A unit computes, and its weights are freed. Is it whole until its "
    "backward is over? A unit may return tensors in any nesting: leave() needs a hook on each of "
    "tree_leaves(outputs) that requires a gradient.",
    "does not end": WAITS, "onnection": WAITS,
    "killed": "A unit computes, and its weights are freed.",
}
WITH_CHECKPOINT = {"": "A checkpoint runs the forward once more inside the backward: there leave() "
                   "must not free the unit, because its backward comes right then. in_backward() "
                   "tells."}
RECOMPUTED = "reentrant", "non-reentrant"
ONE_WAY = ((ADAMW, (True,), 1),)


def _trial(wrapped_class):
    return train(wrapped_class), train_halves(wrapped_class)


def _recomputed_trial(wrapped_class):
    return [(watch(wrapped_class, how), train(wrapped_class, False, how, ONE_WAY))
            for how in RECOMPUTED]


def check_ZeroStage3(wrapped_class):
    with hinted(FAILURES):
        seen = on_ranks(watch, wrapped_class, ranks=3, timeout=LIMIT)
    for rank, watched in enumerate(seen):
        _compare_watched(rank_name(rank, 3), 3, *watched)
    yield "a unit is whole while it computes, and the next is on its way; then it is freed"
    yield "also with sync=False, and without gradients; in backward gradients go unit by unit"
    yield "units travel twice in a step, all other parameters once, gradients once: (R-1)/R"
    for ranks in (3, 1):
        with hinted(FAILURES):
            seen = on_ranks(_trial, wrapped_class, ranks=ranks, timeout=LIMIT)
        compare_training([rank_name(rank, ranks) for rank in range(ranks)],
                         [steps for steps, _ in seen], GRADIENT)
        compare_halves([halves for _, halves in seen])
    yield "equal to one process on 1 and 3 ranks: AdamW, SGD with momentum, several backwards"
    yield "tied, frozen, a unit that is used twice, float64, bfloat16 with float32 masters"
    with hinted(FAILURES | WITH_CHECKPOINT):
        seen = on_ranks(_recomputed_trial, wrapped_class, ranks=2, timeout=LIMIT)
        for number, how in enumerate(RECOMPUTED):
            where = [f"{rank_name(rank, 2)}, {how} checkpoint" for rank in range(2)]
            for rank, both in enumerate(seen):
                _compare_watched(where[rank], 2, *both[number][0], is_prefetched=False)
            compare_training(where, [both[number][1] for both in seen], GRADIENT)
    yield "a checkpoint runs the forward once more, and nothing travels for it"
    with hinted({"": "Hand the group on: what the units do by themselves is over bucket.group."}):
        seen = on_ranks(train, wrapped_class, True, None, IN_GROUPS, ranks=4, timeout=LIMIT)
        compare_training(in_groups(), seen, "")
    yield "inside a group it meets nobody else"


def _compare_watched(where, ranks, steps, evaluated, is_prefetched=True):
    for number, step in enumerate(steps):
        here = f"{where}, step {number + 1}" + ", with sync=False" * (number == 2)
        for event in step["events"]:
            _compare_event(here, *event, is_prefetched and (number > 0 or event[0] != "forward"))
            if number < 2:
                _compare_gradients(here, *event)
        if step["between"]:
            raise Mistake(f"{here}: after forward {_are(step['between'])} whole", "leave() frees "
                          "each unit after its forward, unit.free(); and what is prefetched must "
                          "be used.")
        if step["whole"]:
            raise Mistake(f"{here}: after backward {_are(step['whole'])} whole", "backward_done() "
                          "frees the unit, with sync=False too.")
        if step["rest"]:
            raise Mistake(f"{here}: after backward what belongs to no unit is whole",
                          "backward_of() calls self.backward_begins(): then finish() comes at the "
                          "end of every backward, with sync=False too, and frees all.")
        _compare_sent(here, step, ranks, has_gradients=number < 2)
        if step["missing"]:
            raise Mistake(f"{here}: nobody has waited for {step['missing']} messages",
                          "Free a unit with unit.free(), which waits for its gather.")
    if evaluated["whole"]:
        raise Mistake(f"{where}: after a forward without gradients {_are(evaluated['whole'])} "
                      "whole", "leave() frees the unit, whether a backward will come or not.")


def _compare_event(where, what, number, whole, under_way, _, is_prefetched):
    """The block itself is whole, and the one that comes next; no other."""
    step = 1 if what == "forward" else -1
    then = number + step
    where = f"{where}: while block {number}'s {what} begins, {_are(whole)} whole"
    call, place = (("enter()", "self.place_in_order(unit) + 1") if step == 1 else
                   ("backward_of()", "place - 1"))
    if is_prefetched and 0 <= then < BLOCKS and then not in whole:
        raise Mistake(f"{where}: block {then} comes next, and is not on its way", f"{call} begins "
                      f"the gather of the next one: self.prefetch({place}).")
    if is_prefetched and 0 <= then < BLOCKS and then not in under_way:
        raise Mistake(f"{where}: block {then} has arrived already", f"{call} must not wait for the "
                      "next one: self.prefetch() begins its gather, and it travels meanwhile.")
    if set(whole) - {number, then}:
        done = "leave() frees it after its forward" if step == 1 else (
            "backward_done() frees it after its backward, and leave() after its forward")
        raise Mistake(where, f"What has computed is freed: {done}. And no other one than the next "
                      f"is gathered ahead: self.prefetch({place}).")


def _compare_gradients(where, what, number, whole, under_way, gradients):
    if len(gradients) > 2:
        raise Mistake(f"{where}: while block {number}'s {what} begins, blocks {gradients} have "
                      "whole gradients", "backward_done() reduces the unit's gradients as soon as "
                      "its backward is over: self.reduce(unit), where self.sync is True.")


def _compare_sent(where, step, ranks, has_gradients):
    once, blocks, whole = (ranks - 1) / ranks, step["blocks"], step["all"]
    right = once * (whole + blocks + whole * has_gradients)
    if is_near(step["sent"], right):
        return
    hint = ("Each unit is gathered for its forward and for its backward; its gradients are "
            "reduced once. Is one gathered that is not used next?")
    if not has_gradients and step["sent"] > right:
        hint = "With sync=False gradients stay: call self.reduce(unit) where self.sync is True."
    raise Mistake(f"{where}: {step['sent']:,.0f} bytes sent, not {right:,.0f}", hint)


def _are(blocks):
    return f"block{'s' * (len(blocks) != 1)} {blocks} {'is' if len(blocks) == 1 else 'are'}"
