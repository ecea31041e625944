"""Lab 04, reading what a job did: mistakes that were let through once, each closed since.

The first line of each docstring is a pattern that the check's output must hold.
"""

from statistics import mean, median

import torch

from ranklab.ddp import exposed_communication, steps_of

# --- scaling_efficiency ---------------------------------------------------------------------------


def _refuse(seconds, kind):
    if kind not in ("strong", "weak"):
        raise ValueError(kind)
    if not seconds or min(seconds) < 1 or min(seconds.values()) <= 0:
        raise ValueError(seconds)


def _efficiency(seconds, kind, base=None):
    base = base or min(seconds)
    return {ranks: (base / ranks if kind == "strong" else 1) * seconds[base] / seconds[ranks]
            for ranks in sorted(seconds)}


def scaling_efficiency__first_given(seconds, kind):
    """The base is 8 here, but it is the fewest ranks"""
    _refuse(seconds, kind)
    return _efficiency(seconds, kind, base=next(iter(seconds)))


def scaling_efficiency__whole_multiples_of_the_base(seconds, kind):
    """the efficiency on 5 ranks is 0.8, not 1"""
    _refuse(seconds, kind)
    base = min(seconds)
    return {ranks: seconds[base] / seconds[ranks] / (ranks // base if kind == "strong" else 1)
            for ranks in sorted(seconds)}


def scaling_efficiency__never_above_one(seconds, kind):
    """More than 1 can be right"""
    _refuse(seconds, kind)
    return {ranks: min(1.0, value) for ranks, value in _efficiency(seconds, kind).items()}


def scaling_efficiency__rounded(seconds, kind):
    """Leave rounding to whoever prints it"""
    _refuse(seconds, kind)
    return {ranks: round(value, 2) for ranks, value in _efficiency(seconds, kind).items()}


def scaling_efficiency__in_the_order_given(seconds, kind):
    """In the order of ranks"""
    _refuse(seconds, kind)
    right = _efficiency(seconds, kind)
    return {ranks: right[ranks] for ranks in seconds}


def scaling_efficiency__no_measurement_is_none(seconds, kind):
    """seconds=\\{\\} is accepted"""
    if kind not in ("strong", "weak"):
        raise ValueError(kind)
    return _efficiency(seconds, kind) if seconds else {}


def scaling_efficiency__divides_by_no_seconds(seconds, kind):
    """2: 0.0\\} raises ZeroDivisionError, not ValueError"""
    if kind not in ("strong", "weak"):
        raise ValueError(kind)
    if not seconds or min(seconds) < 1:
        raise ValueError(seconds)
    return _efficiency(seconds, kind)


# --- exposed_communication ------------------------------------------------------------------------


def exposed_communication__counts_milliseconds(events, kind="communication"):
    """go from one edge to the next"""
    start = min((e.start for e in events), default=0)
    ticks = round(1000 * (max((e.end for e in events), default=0) - start))
    exposed = 0
    for tick in range(ticks):
        now = start + (tick + 0.5) / 1000
        running = {e.kind for e in events if e.start <= now < e.end}
        exposed += kind in running and "compute" not in running
    return exposed / 1000


def exposed_communication__milliseconds(events, kind="communication"):
    """Those are milliseconds"""
    return 1000 * _exposed(events, kind)


def exposed_communication__float32(events, kind="communication"):
    """float32 has not"""
    times = torch.tensor([[e.start, e.end] for e in events]).reshape(-1, 2).tolist()
    return _exposed([e._replace(start=a, end=b) for e, (a, b) in zip(events, times)], kind)


def exposed_communication__loading_counts_as_well(events, kind="communication"):
    """Another kind of event is counted as well"""
    return _exposed([e._replace(kind=kind) if e.kind == "loader" else e for e in events], kind)


def exposed_communication__lane_by_lane(events, kind="communication"):
    """on whatever lane"""
    return sum(_exposed([e for e in events if e.lane == lane], kind)
               for lane in {e.lane for e in events})


def _exposed(events, kind):
    edges = sorted((t, change, e.kind) for e in events
                   for t, change in ((e.start, 1), (e.end, -1)))
    running, exposed, before = {kind: 0, "compute": 0}, 0.0, 0.0
    for t, change, what in edges:
        if running[kind] and not running["compute"]:
            exposed += t - before
        before = t
        if what in running:
            running[what] += change
    return exposed


# --- diagnose -------------------------------------------------------------------------------------


def _bare_loading(step):
    return exposed_communication(step, kind="loader")


def _total(step, kind):
    return sum(e.end - e.start for e in step if e.kind == kind)


def _more_than_others(computing, loading):
    """What the busiest rank works more than the mean of the others."""
    *others, most = sorted(c + stall for c, stall in zip(computing, loading))
    return most - mean(others) if others else 0.0


def _diagnose(timelines, loads=_bare_loading, exposed=exposed_communication,
              straggles=_more_than_others, asked=None, whole=1):
    steps = [steps_of(events) for events in timelines]
    if not steps or not all(steps):
        raise ValueError("no steps")

    def usual(measure):
        return [median(measure(step) for step in of_rank) for of_rank in steps]

    duration = max(usual(lambda step: max(e.end for e in step) - min(e.start for e in step)))
    loading, computing = usual(loads), usual(lambda step: _total(step, "compute"))
    seconds = {"loader-bound": mean(loading), "communication-bound": min(usual(exposed)),
               "straggler": straggles(computing, loading)}
    shares = {name: whole * value / duration for name, value in seconds.items()}
    large = [name for name in shares if shares[name] >= whole / 4]
    if asked:  # in a fixed order
        return next((name for name in asked if name in large), "healthy"), shares
    return max(large, key=shares.get, default="healthy"), shares


def diagnose__all_loading(timelines):
    """loading that no computing hides"""
    return _diagnose(timelines, loads=lambda step: _total(step, "loader"))


def diagnose__waits_for_communication(timelines):
    """gaps of the main thread, and something else"""
    return _diagnose(timelines, exposed=lambda step: _total(step, "wait"))


def diagnose__loader_is_asked_first(timelines):
    """the verdict is the largest of them"""
    return _diagnose(timelines, asked=("loader-bound", "communication-bound", "straggler"))


def diagnose__communication_is_asked_first(timelines):
    """the verdict is the largest of them"""
    return _diagnose(timelines, asked=("communication-bound", "straggler", "loader-bound"))


def diagnose__straggler_is_asked_first(timelines):
    """the verdict is the largest of them"""
    return _diagnose(timelines, asked=("straggler", "communication-bound", "loader-bound"))


def diagnose__all_the_busiest_left_out(timelines):
    """two of three ranks are slow.*the mean of the \\*other\\* ranks"""

    def straggles(computing, loading):
        work = [c + stall for c, stall in zip(computing, loading)]
        others = [w for w in work if w < max(work)]
        return max(work) - mean(others) if others else 0.0

    return _diagnose(timelines, straggles=straggles)


def diagnose__equally_busy_ranks_leave_nobody(timelines):
    """Ranks may be equally busy"""

    def straggles(computing, loading):
        work = [c + stall for c, stall in zip(computing, loading)]
        return max(work) - mean([w for w in work if w < max(work)])

    return _diagnose(timelines, straggles=straggles)


def diagnose__mean_of_no_others(timelines):
    """With one rank there are no others"""

    def straggles(computing, loading):
        *others, most = sorted(c + stall for c, stall in zip(computing, loading))
        return most - mean(others)

    return _diagnose(timelines, straggles=straggles)


def diagnose__two_busiest_ranks(timelines):
    """rank 0 loads long, rank 1 computes long"""

    def straggles(computing, loading):
        none = [0.0] * len(computing)
        return _more_than_others(computing, none) + _more_than_others(none, loading)

    return _diagnose(timelines, straggles=straggles)


def diagnose__per_cent(timelines):
    """That is per cent"""
    return _diagnose(timelines, whole=100)


def diagnose__no_steps_are_healthy(timelines):
    """Leave the stub's ValueError in"""
    if not timelines or not all(steps_of(events) for events in timelines):
        return "healthy", dict.fromkeys(("loader-bound", "communication-bound", "straggler"), 0.0)
    return _diagnose(timelines)
