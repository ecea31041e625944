"""The checks of schedules. No process is needed: a schedule is data, and its times are computed."""

from ranklab.checks.exercise import Mistake
from ranklab.pipeline_parallel import (
    bubble_fraction, flush_bubble, in_flight_activations, interleaved_in_flight,
    one_f_one_b_in_flight, places, problems, simulate, zb_h1_bubble, zb_h1_in_flight, zb_v_schedule,
)

SHAPES = [(P, M) for P in (1, 2, 3, 4, 8) for M in sorted({1, 2, P, P + 1, 2 * P + 1, 12})]
THIN = [(P, k * P, V) for P in (1, 2, 3, 4, 8) for k in (1, 2, 4) for V in (1, 2, 3, 4)]
RETURN = "Return a tuple with a tuple of actions for each rank: Action(\"F\", stage, micro_batch)."
PROBLEMS = {
    "ranks, not": RETURN,
    "is no action": f"{RETURN} Micro-batches are 0 to M - 1: a warm-up is no longer than that.",
    "is there": "Each stage does each micro-batch once, also where there are fewer micro-batches "
                "than stages: min(..., micro_batches).",
    "it must have one": "Each forward needs its backward, also after the last forward.",
    "equally many": "All ranks have equally many stages.",
    "no rank can go on": "That is a deadlock. A rank has to do enough forwards before its first "
                         "backward: the more, the nearer it is to the start.",
    "before": "A rank has to do the forward of a micro-batch before its backward, and I before W.",
}
SUM = ("Gradients of weights are added up in this order, and each sum is rounded. One process takes "
       "micro-batches as 0, 1, 2, ...: in this order the sums are the same to the last bit, else "
       "only but for rounding.")


def check_gpipe_schedule(gpipe_schedule):
    for P, M in SHAPES:
        where, schedule = _valid(gpipe_schedule, P, M)
        for rank, actions in enumerate(schedule):
            if "BF" in "".join(action.kind for action in actions):
                raise Mistake(f"{where}: rank {rank} does a forward after a backward", "GPipe does "
                              "all forwards first: its memory is large, and the rule is simple.")
        _in_order(where, schedule)
    yield "all forwards, then all backwards, on 1 to 8 ranks; fewer micro-batches than ranks, too"
    yield "each stage takes the micro-batches in their order, so sums are those of one process"
    yield from _illegal(gpipe_schedule, (0, 4), (4, 0))


def check_one_f_one_b_schedule(one_f_one_b_schedule):
    for P, M in SHAPES:
        where, schedule = _valid(one_f_one_b_schedule, P, M)
        _in_order(where, schedule)
        _memory(where, schedule, one_f_one_b_in_flight(P, M), "Rank s does P - s - 1 forwards "
                "first, one for each stage after it, and then F and B in turn.")
        _bubble(where, schedule, flush_bubble(P, M), "Rank s does P - s - 1 forwards first. With "
                "fewer it waits for the first gradient, while it could do another forward.")
    yield "valid, and no deadlock, on 1 to 8 ranks; fewer micro-batches than ranks, too"
    yield "each stage takes the micro-batches in their order, so sums are those of one process"
    yield "rank s holds at most P - s micro-batches; the bubble is (P - 1) / (M + P - 1)"
    yield from _illegal(one_f_one_b_schedule, (0, 4), (4, 0))


def check_interleaved_schedule(interleaved_schedule):
    for P, M, V in THIN:
        where, schedule = _valid(interleaved_schedule, P, M, V)
        _in_order(where, schedule)
        _memory(where, schedule, interleaved_in_flight(P, M, V), "Rank r does (V - 1) * P + "
                "2 * (P - r - 1) forwards first, at most all M * V, and then F and B in turn.")
        _bubble(where, schedule, flush_bubble(P, M, V), "Micro-batches go in rounds of P: a round "
                "passes the rank's first stage, then its second, ... Backward it is the last stage "
                "first. Before the first B a rank does (V - 1) * P + 2 * (P - r - 1) forwards.")
    yield "valid, and no deadlock, with 1 to 4 stages on each of 1 to 8 ranks; rank r has r, r + P"
    yield "each stage takes the micro-batches in their order, so sums are those of one process"
    yield "the bubble is (P - 1) / (V * M + P - 1); activations as published"
    yield from _illegal(interleaved_schedule, (4, 6, 2), (3, 2, 1), (0, 4, 2), (4, 0, 2), (2, 2, 0))


def check_zero_bubble_schedule(zero_bubble_schedule):
    for P, M in SHAPES:
        where, schedule = _valid(zero_bubble_schedule, P, M)
        _memory(where, schedule, [min(P, M)] * P, "At most P micro-batches are on a rank, from F "
                "until W: where P wait for their W, do a W before the next F.")
        _bubble(where, schedule, flush_bubble(P, M), "Do at least as well as 1F1B: an I as soon as "
                "it can be done, because another rank waits for it; a W where nothing else can be.")
    yield "valid, and no deadlock, on 1 to 8 ranks; fewer micro-batches than ranks, too"
    yield "at most min(P, M) micro-batches on each rank; the bubble is at most that of 1F1B"
    yield from _illegal(zero_bubble_schedule, (0, 4), (4, 0))
    P, M = 8, 32
    schedule, v_shaped = zero_bubble_schedule(P, M), zb_v_schedule(P, M)
    yield (f"your score with {P} stages, {M} micro-batches: {_percent(schedule)} bubble, peak "
           f"{max(in_flight_activations(schedule))}. 1F1B {flush_bubble(P, M):.1%}, {P}; ZB-H1 "
           f"{zb_h1_bubble(P, M):.1%}, {max(zb_h1_in_flight(P, M))}; ZB-V {_percent(v_shaped)}, "
           f"{max(in_flight_activations(v_shaped)) // 2}")


def _percent(schedule):
    return f"{bubble_fraction(simulate(schedule)):.1%}"


def _valid(make, P, M, *virtual):
    """(its name, the schedule of these numbers), if nothing is wrong with it."""
    where = f"{P} ranks, {M} micro-batches" + "".join(f", {V} stages a rank" for V in virtual)
    schedule = make(P, M, *virtual)
    if not isinstance(schedule, (tuple, list)) \
            or not all(isinstance(actions, (tuple, list)) for actions in schedule):
        raise Mistake(f"{where}: it returns {str(schedule)[:60]}", RETURN)
    for problem in problems(schedule, P, M):
        raise Mistake(f"{where}: {problem}",
                      next(hint for part, hint in PROBLEMS.items() if part in problem))
    right = {stage: stage % P for stage in range(P * max([1, *virtual]))}
    if places(schedule) != right:
        raise Mistake(f"{where}: stages are on the ranks {list(places(schedule).values())}, not "
                      f"{list(right.values())}", "Rank r has the stages r, r + P, r + 2 * P, ...: "
                      "so a micro-batch reaches the last rank soon, and then starts again.")
    return where, schedule


def _in_order(where, schedule):
    """Each stage takes the micro-batches one after the other."""
    for rank, actions in enumerate(schedule):
        for kind, stage in sorted({action[:2] for action in actions}):
            order = [action.micro_batch for action in actions if action[:2] == (kind, stage)]
            if order != sorted(order):
                work = "forwards" if kind == "F" else "backwards"
                raise Mistake(f"{where}: rank {rank} does the {work} of stage {stage} in the order "
                              f"{', '.join(map(str, order))}", SUM)


def _memory(where, schedule, most, hint):
    for rank, (got, right) in enumerate(zip(in_flight_activations(schedule), most)):
        if got > right:
            raise Mistake(f"{where}: rank {rank} holds {got} activations at once, where {right} "
                          "are enough", hint)


def _bubble(where, schedule, most, hint):
    got = bubble_fraction(simulate(schedule))
    if got > most + 1e-9:
        raise Mistake(f"{where}: the bubble is {got:.1%}, where {most:.1%} is possible", hint)


def _illegal(make, *shapes):
    for shape in shapes:
        try:
            make(*shape)
        except ValueError as error:
            if len(str(error).split()) < 3:
                raise Mistake(f"{make.__name__}{shape}: the error says '{error}'", "Say in a "
                              "sentence what is wrong, with the numbers.") from None
        except Exception as error:
            raise Mistake(f"{make.__name__}{shape} raises {type(error).__name__}", "Check the "
                          "numbers first: ValueError(...), with a sentence.") from None
        else:
            raise Mistake(f"{make.__name__}{shape} is no error", "Such a pipeline can't be built: "
                          "ValueError(...), with a sentence.")
    yield "what can't be built is a ValueError, with a sentence"
