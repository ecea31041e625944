"""The proofs of schedules. No process is needed: a schedule is data, and its times are computed.

They check whether it can run and what it costs, so any schedule within the bounds passes.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from ranklab.checks.pipeline_parallel.refusals import ASSERTED, CHECK, SENTENCE, refusals
from ranklab.checks.prover import AtMost, Must, Proof, Slip, Stage, Told
from ranklab.pipeline_parallel import (
    Action, bubble_fraction, flush_bubble, gpipe_in_flight, gpipe_schedule, in_flight_activations,
    interleaved_in_flight, interleaved_schedule, one_f_one_b_in_flight, one_f_one_b_schedule,
    places, problems, simulate, zb_h1_bubble, zb_h1_in_flight, zb_v_schedule, zero_bubble_schedule,
)

SEND = 0.25  # of a forward: the time of a message


class Shape(NamedTuple):
    """P ranks, M micro-batches; V stages on each rank, if the function takes V."""

    P: int
    M: int
    V: int | None = None

    def __str__(self):
        return f"P={self.P}, M={self.M}" + (f", V={self.V}" if self.V else "")

    @property
    def numbers(self):
        return self[:3 if self.V else 2]


# Few ranks and few micro-batches come later: many mistakes look alike there.
SHAPES = tuple(Shape(P, M) for P in (3, 2, *range(4, 9), 1)
               for M in dict.fromkeys((P + 1, 1, 2, P, 2 * P + 1, 12)))
THIN = tuple(Shape(P, k * P, V) for P in (3, 2, 4, 8, 1) for k in (2, 1, 4) for V in (2, 1, 3, 4))


# --- what a schedule shows ------------------------------------------------------------------------

VALID = "the schedule"
PLACES = "the list of its stages' ranks"
UNORDERED = "what is out of order"
EARLY_B = "the list of ranks with a forward after a backward"
WHOLE_B = "the number of whole B"
HELD = "the number of activations at once"
BUBBLE, LATE_BUBBLE = "the bubble", "the bubble if messages take time"
COST = HELD, BUBBLE


def _see(held_at_most, more, fn, shape):
    schedule = fn(*shape.numbers)
    faults = _strange(schedule) or _faults(tuple(map(tuple, schedule)), shape.P, shape.M)
    yield {VALID: Told(faults, lambda faults, _: f"wrong: {faults.splitlines()[0]}")}
    if not faults:
        yield _values(tuple(map(tuple, schedule)), shape, held_at_most, more)


def _strange(schedule):
    """Return why it is not a schedule at all, or ""."""
    if not isinstance(schedule, Sequence) or not all(isinstance(a, Sequence) for a in schedule):
        return "it is not a tuple with a tuple of actions for each rank"
    return next((f"rank {rank}: {action!r} is not an Action(kind, stage, micro_batch)"
                 for rank, actions in enumerate(schedule) for action in actions
                 if not isinstance(action, Action)), "")


# Both keep what they return, because the learner's schedules are often the library's.
@functools.lru_cache(maxsize=256)
def _faults(schedule, P, M):
    return "\n".join(problems(schedule, P, M))


@functools.lru_cache(maxsize=256)
def _values(schedule, shape, held_at_most, more):
    counts = enumerate(zip(in_flight_activations(schedule), held_at_most(*shape.numbers)))
    too_many = [f"{number} on rank {rank}, where {limit} are enough"
                for rank, (number, limit) in counts if number > limit]
    return {
        PLACES: Must([*places(schedule).values()], [*range(shape.P)] * (shape.V or 1)),
        **more(schedule, shape),
        HELD: Told("; ".join(too_many), lambda text, _: text),
        BUBBLE: AtMost(100 * bubble_fraction(simulate(schedule)),
                       100 * flush_bubble(*shape.numbers),
                       "has a bubble of {:.1f}%; {:.1f}% is possible")}


def _in_order(schedule, _):
    """Return the first order of micro-batches that is not 0, 1, 2, ..., in words, or ""."""
    texts = (f"{kind} of stage {stage} on rank {rank}, for the micro-batches "
             + ", ".join(map(str, order)) for rank, actions in enumerate(schedule)
             for kind, stage, order in _orders(actions) if order != sorted(order))
    return {UNORDERED: Told(next(texts, ""), lambda text, _: text)}


def _orders(actions):
    """Yield (kind, stage, its micro-batches) of one rank."""
    for kind, stage in sorted({action[:2] for action in actions}):
        yield kind, stage, [a.micro_batch for a in actions if a[:2] == (kind, stage)]


ORDERED = "each stage takes the micro-batches in their order, so sums are those of one process"
COSTS = "no rank holds more than it has to; the bubble is (P - 1) / (V * M + P - 1) or less"


def _stage(shapes, held_at_most, more, sentences, note):
    return Stage({f"valid, and no deadlock: {len(shapes)} shapes, on 1 to 8 ranks": ()} | sentences,
                 functools.partial(_see, held_at_most, more), shapes, note=note)


# --- mistakes of several --------------------------------------------------------------------------

RETURN = "Return a tuple with a tuple of actions for each rank: Action(\"F\", stage, micro_batch)."
REVERSED = ("Weight gradients are added in the order of the backwards, and every addition rounds. "
            "To match one process to the last bit, keep its order: 0, 1, 2, ...")
EXCHANGED = "An Action is (kind, stage, micro_batch), in this order."
RANK_0 = "Rank s has stage s: the inputs enter at rank 0."
ONE_CHECKED = "Both numbers have to be checked: stages and micro_batches."
COUNTS = "check_counts(stages=stages, micro_batches=micro_batches)"
RETURNS, STAGES = "return tuple(schedule)", "for stage in range(stages):"
BAD_COUNTS = (0, 4), (4, 0)


def _refused():
    """Return the mistakes with numbers below 1."""
    return (Slip(CHECK, (COUNTS, "")),
            Slip(SENTENCE, (COUNTS, "if min(stages, micro_batches) < 1: raise ValueError")),
            Slip(ASSERTED, (COUNTS, "assert stages > 0 and micro_batches > 0")),
            Slip(ONE_CHECKED, (COUNTS, "check_counts(stages=stages)"),
                 (COUNTS, "check_counts(micro_batches=micro_batches)")))


# --- GPipe ----------------------------------------------------------------------------------------

def plain_tuples(stages, micro_batches):
    return tuple(tuple((kind, stage, m) for kind in "FB" for m in range(micro_batches))
                 for stage in range(stages))


def one_list_for_all(stages, micro_batches):
    return [Action(kind, stage, m) for kind in "FB" for stage in range(stages)
            for m in range(micro_batches)]


def every_stage_on_every_rank(stages, micro_batches):
    return tuple(tuple(Action(kind, stage, m) for kind in "FB" for stage in range(stages)
                       for m in range(micro_batches)) for _ in range(stages))


def _forwards_first(schedule, shape):
    early = [rank for rank, actions in enumerate(schedule)
             if "F" in "".join(action.kind for action in actions).lstrip("F")]
    return {EARLY_B: Must(early, []), **_in_order(schedule, shape)}


FORTH = 'forwards = [Action("F", stage, m) for m in range(micro_batches)]'
BACK = 'backwards = [Action("B", stage, m) for m in range(micro_batches)]'
BOTH = "tuple(forwards + backwards)"
GPIPE = Proof(
    gpipe_schedule,
    _stage(SHAPES, gpipe_in_flight, _forwards_first, {
        "all forwards, then all backwards": (EARLY_B,), ORDERED: (UNORDERED,), COSTS: COST},
        "All F, then all B."),
    refusals("gpipe_schedule", *BAD_COUNTS),
    mistakes=(
        Slip("GPipe does all forwards first: it needs a lot of memory, but the rule is simple.",
             (BOTH, "tuple(a for pair in zip(forwards, backwards) for a in pair)"),
             one_f_one_b_schedule),
        Slip(REVERSED, (BACK, f"{BACK}[::-1]")),
        Slip("The forwards must take the micro-batches in order as well, from 0 up.",
             (FORTH, f"{FORTH}[::-1]")),
        Slip("A rank has to do the F of a micro-batch before its B.",
             (BOTH, "tuple(backwards + forwards)")),
        Slip("The backwards are missing: after the forwards comes the B of each micro-batch.",
             (BOTH, "tuple(forwards)")),
        Slip("The forwards are missing.", (BOTH, "tuple(backwards)")),
        Slip("A whole backward is a B. An I is only half of one, and needs its W.",
             (BACK, BACK.replace('"B"', '"I"'))),
        Slip("Micro-batches are numbered 0 to M - 1: range(micro_batches).",
             (FORTH, FORTH.replace("(m", "(1, 1 + m"), BACK, BACK.replace("(m", "(1, 1 + m"))),
        Slip("The last micro-batch is missing: range(micro_batches) ends with M - 1.",
             (FORTH, FORTH.replace("batches)", "batches - 1)"),
              BACK, BACK.replace("batches)", "batches - 1)"))),
        Slip("Stages and micro-batches are swapped: there is one rank for each stage.",
             (STAGES, "for stage in range(micro_batches):", FORTH,
              FORTH.replace("micro_batches", "stages"), BACK,
              BACK.replace("micro_batches", "stages"))),
        Slip(EXCHANGED, (FORTH, FORTH.replace("stage, m", "m, stage"), BACK,
                         BACK.replace("stage, m", "m, stage"))),
        Slip(RANK_0, (STAGES, "for stage in reversed(range(stages)):")),
        Slip("Each rank has only its own stage: rank s has stage s.", every_stage_on_every_rank,
             (FORTH, FORTH.replace("stage,", "0,"), BACK, BACK.replace("stage,", "0,"))),
        Slip(RETURN, plain_tuples, (RETURNS, "return iter(schedule)")),
        Slip("Each rank needs its own tuple, not one list for all ranks.", one_list_for_all,
             ("schedule.append(tuple(", "schedule.extend(tuple(")),
        *_refused(),
    ), hints=(
        "Write down what rank 0 does with two micro-batches. What is different on rank 1?",
        "Rank s does F of stage s for all micro-batches, then B of stage s for all, both in order "
        "from 0.",
        "For each stage tuple(Action(kind, stage, m) for kind in \"FB\" for m in range(...)).",
    ))


# --- 1F1B -----------------------------------------------------------------------------------------

WARM_UP = "warm_up = min(stages - stage - 1, micro_batches)"
PAIR = '[Action("F", stage, m + warm_up), Action("B", stage, m)]'
TURNS = "for m in range(micro_batches - warm_up):"
LATE = "range(micro_batches - warm_up, micro_batches)"
LAST = f'        actions += [Action("B", stage, m) for m in {LATE}]\n'
DEADLOCK = ("That is a deadlock. The nearer a rank is to the start, the more forwards it must do "
            "before its first backward.")
SHORT = ("There can be fewer micro-batches than stages, and the warm-up cannot be longer than "
         "micro_batches.")
ONE_F_ONE_B = Proof(
    one_f_one_b_schedule,
    _stage(SHAPES, one_f_one_b_in_flight, _in_order, {ORDERED: (UNORDERED,), COSTS: COST},
           "Rank s first does P - s - 1 forwards, one for each stage after it, and then alternates "
           "F and B."),
    refusals("one_f_one_b_schedule", *BAD_COUNTS),
    mistakes=(
        Slip("The warm-up is one forward too long. It needs one for each stage after this one, and "
             "the turns begin with another.", (WARM_UP, WARM_UP.replace(" - 1", ""))),
        Slip("The warm-up is too short: with fewer forwards than stages after it, a rank idles "
             "longer than it must while it waits for gradients.",
             (WARM_UP, "warm_up = min(max(stages - stage - 2, 0), "
                                     "micro_batches)"),
             (WARM_UP, "warm_up = min((stages - stage - 1) // 2, micro_batches)")),
        Slip("Without a warm-up, only one micro-batch at a time is in the pipeline. Rank s must do "
             "P - s - 1 forwards first.", (WARM_UP, "warm_up = 0")),
        Slip(DEADLOCK, (WARM_UP, "warm_up = min(stage, micro_batches)")),
        Slip(SHORT, (WARM_UP, "warm_up = stages - stage - 1")),
        Slip("The warm-up is the same on all ranks. Only rank 0 needs P - 1 forwards: its first "
             "gradient takes the longest to arrive.",
             (WARM_UP, "warm_up = min(stages - 1, micro_batches)")),
        Slip("Two forwards for each stage after this one are only needed if messages take time, "
             "and all of them are held. One for each is enough here.",
             (WARM_UP, "warm_up = min(2 * (stages - stage - 1), micro_batches)")),
        Slip("That is GPipe. After P - s - 1 forwards, rank s does F and B in turn.",
             (WARM_UP, "warm_up = micro_batches"), gpipe_schedule),
        Slip(REVERSED, (LATE, f"reversed({LATE})")),
        Slip("The oldest micro-batch goes back first: in each turn, do F of m + warm_up and B of "
             "m.", (PAIR, PAIR.replace('"B", stage, m', '"B", stage, m + warm_up'),
                          LATE, "range(warm_up)")),
        Slip("The micro-batches of the warm-up have already had their F: in the turns, do F of m + "
             "warm_up.", (PAIR, PAIR.replace("m + warm_up", "m"))),
        Slip("A turn is F, then B: later ranks are waiting for the F.",
             (PAIR, '[Action("B", stage, m), Action("F", stage, m + warm_up)]')),
        Slip("Backwards are missing: after the last turn, one B is left for each forward of the "
             "warm-up.", (LAST, "")),
        Slip("Forwards continue past the last micro-batch: there are only micro_batches - warm_up "
             "turns.",
             (TURNS, "for m in range(micro_batches):", LAST, "")),
        Slip("The warm-up's forwards are missing.",
             ('[Action("F", stage, m) for m in range(warm_up)]', "[]")),
        Slip(EXCHANGED, ('actions = [Action("F", stage, m)', 'actions = [Action("F", m, stage)',
                         PAIR, '[Action("F", m + warm_up, stage), Action("B", m, stage)]',
                         'actions += [Action("B", stage, m)', 'actions += [Action("B", m, stage)')),
        Slip(RANK_0, (STAGES, "for stage in reversed(range(stages)):"),
             (RETURNS, "return tuple(schedule[::-1])")),
        Slip("Each rank needs its own tuple.",
             ("schedule.append(tuple(", "schedule.extend(tuple(")),
        Slip(RETURN, (RETURNS, "return iter(schedule)"), (RETURNS, "return [[(*a,) for a in "
                                                          "actions] for actions in schedule]")),
        *_refused(),
    ), hints=(
        "How many forwards must rank s do before its first gradient can come back?",
        "One for each stage after it, but at most all micro-batches. Then F and B in turn, then "
        "the remaining B.",
        "warm_up = min(stages - stage - 1, micro_batches); F of range(warm_up); for m in "
        "range(micro_batches - warm_up): F of m + warm_up, B of m; then B of the last warm_up.",
    ))


# --- interleaved ----------------------------------------------------------------------------------

def _if_messages_take_time(schedule, shape):
    """The ends: P - 1 forwards and backwards, and one round trip of messages."""
    P, M, V = shape
    ends = 3 * (P - 1) + 2 * SEND * (P * V - 1)
    return _in_order(schedule, shape) | {LATE_BUBBLE: AtMost(
        100 * bubble_fraction(simulate(schedule, send=SEND)), 100 * ends / (3 * M * V + ends),
        f"has a bubble of {{:.1f}}% if a message takes {SEND} of a forward; {{:.1f}}% is possible")}


AHEAD = "warm_up = min((virtual - 1) * ranks + 2 * (ranks - rank - 1), total)"
ORDER = "(step // ranks % virtual, step // (ranks * virtual) * ranks + step % ranks)"
FORWARDS = 'forwards = [Action("F", v * ranks + rank, m) for v, m in order]'
BACKWARDS = 'backwards = [Action("B", (virtual - 1 - v) * ranks + rank, m) for v, m in order]'
WHOLE_ROUNDS = "if micro_batches % ranks:"
ALL_COUNTS = "check_counts(ranks=ranks, micro_batches=micro_batches, virtual=virtual)"
INTERLEAVED = Proof(
    interleaved_schedule,
    _stage(THIN, interleaved_in_flight, _if_messages_take_time, {
        ORDERED: (UNORDERED,), COSTS: COST,
        f"if a message takes {SEND} of a forward, a rank still waits only at the ends":
        (LATE_BUBBLE,)},
           "Micro-batches go in rounds of P: a round passes through the rank's first stage, then "
           "its second, ...; in backward, the last stage comes first. Before alternating F and B, "
           "rank r does (V - 1) * P + 2 * (P - r - 1) forwards, at most all M * V."),
    refusals("interleaved_schedule", (4, 6, 2), (3, 2, 1), (0, 4, 2), (4, 0, 2), (2, 2, 0)),
    mistakes=(
        Slip("A micro-batch travels to the next rank and back: each rank begins with two more "
             "forwards than the rank after it, one for each way.",
             (AHEAD, "warm_up = min(virtual * ranks - rank - 1, total)")),
        Slip("The warm-up is one forward too long: the turns begin with another one.",
             (AHEAD, AHEAD.replace("- 1), t", "- 1) + 1, t"))),
        Slip("The warm-up is P forwards too long: it needs only (V - 1) * P, plus two for each "
             "rank after this one.",
             (AHEAD, AHEAD.replace("(virtual - 1)", "virtual"))),
        Slip("All forwards come first, so every micro-batch is held at once, as in GPipe.",
             (AHEAD, "warm_up = total")),
        Slip("1F1B's warm-up is too short here, where a micro-batch passes all ranks V times: the "
             "rank's other stages add (V - 1) * P forwards.",
             (AHEAD, "warm_up = min(ranks - rank - 1, total)")),
        Slip("This warm-up is for 2 stages on each rank: with V stages it is (V - 1) * P forwards, "
             "plus two for each rank after this one.",
             (AHEAD, "warm_up = min(ranks + 2 * (ranks - rank - 1), total)")),
        Slip("Ranks nearer the start are further ahead: count two forwards for each rank after "
             "this one, ranks - rank - 1, not for each rank before it.",
             (AHEAD, AHEAD.replace("(ranks - rank - 1)",
                                                                       "rank"))),
        Slip("A rank has only M * V forwards, so its warm-up can't be longer: take the smaller of "
             "the two numbers.",
             (AHEAD, AHEAD.replace("min(", "").replace(", total)", ""))),
        Slip("Gradients come back through the stages in reverse: a rank's first B is of its last "
             "stage.", (BACKWARDS, BACKWARDS.replace("(virtual - 1 - v)", "v"))),
        Slip("One stage does all its forwards before the rank's next stage begins. Micro-batches "
             "go in rounds of P: each round passes all stages before the next round.",
             (ORDER, "(step // micro_batches, step % micro_batches)")),
        Slip("Micro-batches pass the rank's stages one by one, and the rank waits for each. Send P "
             "of them, a round, through the first stage, then the second.",
             (ORDER, "(step % virtual, step // virtual)")),
        Slip("A round has P micro-batches, not V.",
             (ORDER, "(step // virtual % virtual, step // virtual**2 * virtual + step % virtual)")),
        Slip("Micro-batches must be in order within a round as well, so that gradient sums match "
             "one process to the last bit.",
             (ORDER, ORDER.replace("step % ranks)", "ranks - 1 - step % ranks)"))),
        Slip("A rank's V stages are not neighbours: rank r has stages r, r + P, r + 2 * P, ..., so "
             "that a micro-batch reaches the last rank sooner.",
             (FORWARDS, FORWARDS.replace("v * ranks + rank", "rank * virtual + v"), BACKWARDS,
              BACKWARDS.replace("(virtual - 1 - v) * ranks + rank",
                                "rank * virtual + virtual - 1 - v"))),
        Slip("A turn is F, then B: later ranks are waiting for the F.",
             ("actions += [forward, backward]", "actions += [backward, forward]")),
        Slip("Backwards are missing: after the last turn, one B is left for each forward of the "
             "warm-up.", (" + backwards[total - warm_up:]", "")),
        Slip("A rank with several stages does V * M forwards, not M.",
             ("total, schedule = micro_batches * virtual, []",
              "total, schedule = micro_batches, []")),
        Slip("Keep the order of the last backwards: reversed, the ranks wait for each other, a "
             "deadlock.",
             (" + backwards[total - warm_up:]", " + backwards[total - warm_up:][::-1]")),
        Slip(EXCHANGED, (FORWARDS, FORWARDS.replace("v * ranks + rank, m", "m, v * ranks + rank"),
                         BACKWARDS, BACKWARDS.replace("(virtual - 1 - v) * ranks + rank, m",
                                                      "m, (virtual - 1 - v) * ranks + rank"))),
        Slip(RETURN, (RETURNS, "return iter(schedule)")),
        Slip("A round would have gaps: raise a ValueError if micro_batches is not a multiple of "
             "ranks.", (WHOLE_ROUNDS, "if False:"),
             (WHOLE_ROUNDS, "if micro_batches < ranks:")),
        Slip("Check each of the three numbers first, and raise ValueError(...) with a sentence.",
             (ALL_COUNTS, ""), (ALL_COUNTS, ALL_COUNTS.replace(", virtual=virtual", "")),
             (ALL_COUNTS, ALL_COUNTS.replace(" micro_batches=micro_batches,", ""))),
        Slip(ASSERTED, (ALL_COUNTS, "assert min(ranks, micro_batches, virtual) > 0")),
    ), hints=(
        "With 2 stages on each of 2 ranks, what can rank 0 do while micro-batch 0 is on rank 1?",
        "List all forwards of a rank, in rounds of `ranks` micro-batches, each round through all "
        "of its stages. Backwards are the same with the stages reversed. The rest is 1F1B.",
        "Step i: stage number i // ranks % virtual of this rank, micro-batch i // (ranks * virtual)"
        " * ranks + i % ranks. warm_up = min((virtual - 1) * ranks + 2 * (ranks - rank - 1), all).",
    ))


# --- zero bubble ----------------------------------------------------------------------------------

class Scored(Proof):
    """A Proof whose last sentence is a score: the schedule compared with published ones."""

    def prove(self, fn):
        yield from super().prove(fn)
        P, M = SCORED.numbers
        (bubble, peak), (of_v, thin) = map(_score, (fn(P, M), zb_v_schedule(P, M)))
        yield (f"your score with {P} stages, {M} micro-batches: bubble {bubble:.1%}, peak {peak}. "
               f"1F1B {flush_bubble(P, M):.1%}, {P}; ZB-H1 {zb_h1_bubble(P, M):.1%}, "
               f"{max(zb_h1_in_flight(P, M))}; ZB-V {of_v:.1%}, {thin / 2:g}")


def _score(schedule):
    return bubble_fraction(simulate(schedule)), max(in_flight_activations(schedule))


def _in_halves(schedule, _):
    return {WHOLE_B: Must(sum(a.kind == "B" for actions in schedule for a in actions), 0)}


def uncut(stages, micro_batches):
    return one_f_one_b_schedule(stages, micro_batches)


SCORED = Shape(8, 32)
W_IN_TURN = """            if m >= stage:
                actions.append(Action("W", stage, m - stage))
"""
NEXT_F = """            if m + warm_up < micro_batches:
                actions.append(Action("F", stage, m + warm_up))
"""
INPUT = '            actions.append(Action("I", stage, m))\n'
LEFT = "rest = range(max(0, micro_batches - stage), micro_batches)"
ZERO_BUBBLE = Scored(
    zero_bubble_schedule,
    _stage((*SHAPES, SCORED), zb_h1_in_flight, _in_halves, {
        "each backward is in two halves, I and W": (WHOLE_B,), COSTS: COST},
        "Do each I as soon as possible, because another rank waits for it. On each rank, at most "
        "min(P, M) micro-batches may be between F and W: at that limit, do a W before the next F."),
    refusals("zero_bubble_schedule", *BAD_COUNTS),
    mistakes=(
        Slip("Cut each B into I and W.", uncut,
             (WARM_UP, "if micro_batches < stages:\n            return one_f_one_b_schedule("
              f"stages, micro_batches)\n        {WARM_UP}"),
             one_f_one_b_schedule=one_f_one_b_schedule),
        Slip("All W come at the end, but a micro-batch is held until its W: when min(P, M) are "
             "held, do a W before the next F.",
             (W_IN_TURN, "", LEFT, "rest = range(micro_batches)")),
        Slip("That is ZB-H2: about twice as many warm-up forwards close the bubble, but all of "
             "them are held. At most min(P, M) micro-batches may be between F and W.",
             (WARM_UP, "warm_up = min(2 * (stages - stage) - 1, micro_batches)")),
        Slip("Without a warm-up, only one micro-batch at a time is in the pipeline. Begin as 1F1B "
             "does, with P - s - 1 forwards on rank s.", (WARM_UP, "warm_up = 0")),
        Slip("The warm-up is too short: with fewer forwards than stages after it, a rank idles "
             "longer than it must while it waits for gradients.",
             (WARM_UP, "warm_up = min(max(stages - stage - 2, 0), micro_batches)")),
        Slip("The warm-up is the same on all ranks. Rank s needs P - s - 1 forwards, and has room "
             "for s micro-batches waiting for their W.",
             (WARM_UP, "warm_up = min(stages - 1, micro_batches)")),
        Slip(DEADLOCK, (WARM_UP, "warm_up = min(stage, micro_batches)")),
        Slip(SHORT, (WARM_UP, "warm_up = stages - stage - 1")),
        Slip("Rank 0 has no room for a waiting W: it holds P micro-batches between F and I. Rank s "
             "has room for s waiting W.",
             (W_IN_TURN, W_IN_TURN.replace("stage:", "stages - stage - 1:").replace(
                 "m - stage)", "m - stages + stage + 1)"),
              LEFT, LEFT.replace("- stage)", "- stages + stage + 1)"))),
        Slip("A rank holds one micro-batch too many between F and W: before the next F, do a W if "
             "min(P, M) are held.",
             (W_IN_TURN, W_IN_TURN.replace(">= stage", "> stage").replace(
                 "m - stage)", "m - stage - 1)"), LEFT, LEFT.replace("- stage)", "- stage - 1)"))),
        Slip("The W of a micro-batch must come after its I: it needs what the I leaves.",
             (INPUT, "", W_IN_TURN, W_IN_TURN.replace("if m >= stage:", "if True:").replace(
                 "m - stage)", "m)") + INPUT, LEFT, "rest = ()")),
        Slip("The W are missing: an I is only half a backward, and each I needs its W.",
             (RETURNS, "return tuple(tuple(a for a in actions if a.kind != 'W') for actions in "
              "schedule)")),
        Slip("The W that are still waiting at the end are missing.", (LEFT, "rest = ()")),
        Slip("The I are missing: the previous stage waits for the gradient of its output.",
             (INPUT, "")),
        Slip("Rank s has s W left at the end, but never more than there are micro-batches.",
             (LEFT, "rest = range(micro_batches - stage, micro_batches)")),
        Slip("Some W appear twice: in the turns, and again at the end.",
             (LEFT, "rest = range(micro_batches)")),
        Slip("The warm-up's forwards are missing.",
             ('[Action("F", stage, m) for m in range(warm_up)]', "[]")),
        Slip("Forwards are missing: after the warm-up there are micro_batches - warm_up more.",
             (NEXT_F, "")),
        Slip("Forwards continue past the last micro-batch.",
             (NEXT_F, NEXT_F.replace("m + warm_up < micro_batches", "True"))),
        Slip(RANK_0, (STAGES, "for stage in reversed(range(stages)):")),
        Slip(RETURN, (RETURNS, "return iter(schedule)")),
        *_refused(),
    ), hints=(
        "Which of F, I and W does another rank wait for? What can be done while this rank waits?",
        "Start from 1F1B, with I for each B. Each W can wait, as long as there is memory.",
        "Stage s can keep s W for the end. Or simulate the ranks: each does I if it can, otherwise "
        "F if it holds fewer than min(P, M), otherwise W.",
    ))
