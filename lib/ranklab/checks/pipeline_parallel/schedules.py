"""The checks of schedules. No process is needed: a schedule is data, and its times are computed."""

from ranklab.checks.exercise import Mistake
from ranklab.pipeline_parallel import (
    bubble_fraction, flush_bubble, gpipe_in_flight, in_flight_activations, interleaved_in_flight,
    one_f_one_b_in_flight, places, problems, simulate, zb_h1_bubble, zb_h1_in_flight, zb_v_schedule,
)

SHAPES = [(P, M) for P in range(1, 9) for M in sorted({1, 2, P, P + 1, 2 * P + 1, 12})]
SEND = 0.25  # of a forward: the time of a message
THIN = [(P, k * P, V) for P in (1, 2, 3, 4, 8) for k in (1, 2, 4) for V in (1, 2, 3, 4)]
RETURN = "Return a tuple with a tuple of actions for each rank: Action(\"F\", stage, micro_batch)."
DEADLOCK = "no rank can go on"
PROBLEMS = {
    "ranks, not": RETURN,
    "is no action": f"{RETURN} Micro-batches are 0 to M - 1: a warm-up is no longer than that.",
    DEADLOCK: "That is a deadlock. A rank has to do enough forwards before its first "
                         "backward: the more, the nearer it is to the start.",
    "before": "A rank has to do the F of a micro-batch before its B or I, and I before W.",
    "": "Each rank has a stage, which does F, and then B, or I and W, once for each micro-batch; "
        "also where there are fewer micro-batches than stages, and after the last F.",
}


def check_gpipe_schedule(gpipe_schedule):
    for P, M in SHAPES:
        where, schedule = _valid(gpipe_schedule, P, M)
        for rank, actions in enumerate(schedule):
            if "BF" in "".join(action.kind for action in actions):
                raise Mistake(f"{where}: rank {rank} does a forward after a backward", "GPipe does "
                              "all forwards first: its memory is large, and the rule is simple.")
    yield "all forwards, then all backwards"
    yield from _check(gpipe_schedule, SHAPES, gpipe_in_flight, "All F, then all B.")
    yield from illegal(gpipe_schedule, (0, 4), (4, 0))


def check_one_f_one_b_schedule(one_f_one_b_schedule):
    yield from _check(one_f_one_b_schedule, SHAPES, one_f_one_b_in_flight, "Rank s does P - s - 1 "
                      "forwards first, one for each stage after it, and then F and B in turn. With "
                      "more it holds more, with fewer it waits for the first gradient.")
    yield from illegal(one_f_one_b_schedule, (0, 4), (4, 0))


def check_interleaved_schedule(interleaved_schedule):
    yield from _check(interleaved_schedule, THIN, interleaved_in_flight, "Micro-batches go in "
                      "rounds of P: a round passes the rank's first stage, then its second, ...; "
                      "backward the last stage comes first. Before F and B in turn rank r does "
                      "(V - 1) * P + 2 * (P - r - 1) forwards, at most all M * V.")
    for P, M, V in THIN:  # the ends: P - 1 forwards and backwards, and one round trip of messages
        spans = simulate(interleaved_schedule(P, M, V), send=SEND)
        ends, got = 3 * (P - 1) + 2 * SEND * (P * V - 1), bubble_fraction(spans)
        if got > (most := ends / (3 * M * V + ends)) + 1e-9:
            raise Mistake(f"P={P}, M={M}, V={V}: if a message takes {SEND} of a forward, the "
                          f"bubble is {got:.1%}, and {most:.1%} is possible", "A micro-batch that "
                          "comes back from the next rank has travelled there and back: each rank "
                          "begins two forwards more than the one after it, one for each way.")
    yield f"if a message takes {SEND} of a forward, a rank still waits only at the ends"
    yield from illegal(interleaved_schedule, (4, 6, 2), (3, 2, 1), (0, 4, 2), (4, 0, 2), (2, 2, 0))


def check_zero_bubble_schedule(zero_bubble_schedule):
    yield from _check(zero_bubble_schedule, SHAPES, zb_h1_in_flight, "Do each I as soon as it can "
                      "be done, because another rank waits for it. At most min(P, M) micro-batches "
                      "of a rank may be between F and W: when there are that many, do a W before "
                      "the next F.",
                      is_ordered=False)
    yield from illegal(zero_bubble_schedule, (0, 4), (4, 0))
    for P, M in (*SHAPES, (8, 32)):
        schedule = zero_bubble_schedule(P, M)
        if any(action.kind == "B" for actions in schedule for action in actions):
            raise Mistake(f"P={P}, M={M}: it has whole B", "Cut each into I and W.")
    (bubble, peak), of_v = _score(schedule), _score(zb_v_schedule(P, M))
    yield (f"your score with {P} stages, {M} micro-batches: bubble {bubble:.1%}, peak {peak}. 1F1B "
           f"{flush_bubble(P, M):.1%}, {P}; ZB-H1 {zb_h1_bubble(P, M):.1%}, "
           f"{max(zb_h1_in_flight(P, M))}; ZB-V {of_v[0]:.1%}, {of_v[1] / 2:g}")


def _check(make, shapes, in_flight, hint, is_ordered=True):
    """No more activations than `in_flight` says, and a bubble of 1F1B's at most."""
    for shape in shapes:
        where, schedule = _valid(make, *shape)
        if is_ordered:
            _in_order(where, schedule)
        for rank, (got, most) in enumerate(zip(in_flight_activations(schedule), in_flight(*shape))):
            if got > most:
                raise Mistake(f"{where}: rank {rank} holds {got} activations at once, where {most} "
                              "are enough", hint)
        (got, _), most = _score(schedule), flush_bubble(*shape)
        if got > most + 1e-9:
            raise Mistake(f"{where}: the bubble is {got:.1%}, where {most:.1%} is possible", hint)
    yield f"valid, and no deadlock: {len(shapes)} shapes, on 1 to 8 ranks"
    if is_ordered:
        yield "each stage takes the micro-batches in their order, so sums are those of one process"
    yield "no rank holds more than it has to; the bubble is (P - 1) / (V * M + P - 1) or less"


def _score(schedule):
    """(bubble, what a rank holds at most)"""
    return bubble_fraction(simulate(schedule)), max(in_flight_activations(schedule))


def _valid(make, P, M, V=None):
    """(what it is, the schedule), if it could train a model, and stages are where they should."""
    where = f"P={P}, M={M}" + (f", V={V}" if V else "")
    schedule = make(P, M, V) if V else make(P, M)
    problem = next(iter(problems(schedule, P, M)), "")
    kind = next(part for part in PROBLEMS if part in problem)
    hint = PROBLEMS[kind]
    if not problem or kind in (DEADLOCK, "before"):
        hint = _last_first(schedule, P, V or 1) or hint
        found, right = list(places(schedule).values()), [*range(P)] * (V or 1)
        if found != right:
            raise Mistake(f"{where}: stages are on the ranks {found}, not {right}", "Rank r has "
                          "stage r, and with several stages a rank also r + P, r + 2 * P, ...: so "
                          "a micro-batch reaches the last rank soon.")
    if problem:
        raise Mistake(f"{where}: {problem}", hint)
    return where, schedule


def _last_first(schedule, P, V):
    """A sentence where a rank's first B is not of its last stage."""
    for rank, actions in enumerate(schedule):
        first = next((a.stage for a in actions if a.kind == "B"), None)
        if first is not None and first != (last := rank + (V - 1) * P):
            return (f"Rank {rank}'s first B is of stage {first}. Gradients come back through the "
                    f"stages in reverse, so its last one, {last}, is first.")


def _in_order(where, schedule):
    for rank, actions in enumerate(schedule):
        for kind, stage in sorted({action[:2] for action in actions}):
            order = [action.micro_batch for action in actions if action[:2] == (kind, stage)]
            if order != sorted(order):
                raise Mistake(
                    f"{where}: rank {rank} does {kind} of stage {stage} in the order "
                    + ", ".join(map(str, order)), "Gradients of weights are added up in this "
                    "order, and each sum is rounded. One process takes the micro-batches 0, 1, 2, "
                    "...: in its order the sums are equal to the last bit, in others they are not.")


def illegal(fn, *cases):
    """Each of the arguments is a ValueError with a sentence."""
    for arguments in cases:
        call, said = f"{fn.__name__}{arguments}", ""
        try:
            fn(*arguments)
        except Exception as error:
            said = f"{type(error).__name__}({error})"
        if not said.startswith("ValueError") or len(said.split()) < 3:
            raise Mistake(f"{call} {f'raises {said}' if said else 'is no error'}", "It can't be "
                          "done. Check the numbers first: ValueError(...), with a sentence.")
    yield "what can't be done is a ValueError, with a sentence"
