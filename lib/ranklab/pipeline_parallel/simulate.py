"""When each rank runs each action, and how much it holds then: computed, without running it."""

from collections import Counter
from typing import NamedTuple

from ranklab.pipeline_parallel.actions import Action, dependencies, places, result, walk


class Span(NamedTuple):
    """One action with its start and end: simulated here, or measured in a run."""

    rank: int
    action: Action
    start: float
    end: float


def simulate(schedule, forward=1, backward=2, input_gradient=1, weight_gradient=1, send=0):
    """Compute the Spans of all actions, sorted by start.

    Each rank starts each action as soon as its previous action is done and the inputs have arrived.
    forward, backward, input_gradient, weight_gradient: the cost of F, B, I and W, one number for
        all stages or one for each.
    send: the time of a message between two ranks, during which both can compute; messages do not
        wait for each other.
    Raises: ValueError if no rank can go on.
    """
    costs = dict(zip("FBIW", (forward, backward, input_gradient, weight_gradient)))
    place = places(schedule)
    ends, free, spans = {}, [0] * len(schedule), []
    for rank, action in walk(schedule):
        arrivals = [ends[d] + (send if place[d.stage] != rank else 0)
                    for d in dependencies(action, len(place))]
        start = max([free[rank], *arrivals])
        cost = costs[action.kind]
        end = start + (cost if isinstance(cost, (int, float)) else cost[action.stage])
        ends[result(action)] = free[rank] = end
        spans.append(Span(rank, action, start, end))
    return sorted(spans, key=lambda span: (span.start, span.end, span.rank))


def bubble_fraction(spans, flush=True):
    """Return the fraction of the ranks' time in which they are idle: 0.2 for a fifth.

    Every rank's time runs from the first start on any rank to the last end on any rank. Without a
    flush each rank goes on to the next batch when it is done. Then its time runs from its own first
    start to its own last end, and the longest of these counts for all ranks. Papers on zero-bubble
    schedules count like this.
    Lab: 09
    """
    ranks = {span.rank for span in spans}
    busy = sum(span.end - span.start for span in spans)
    groups = [spans] if flush else [[s for s in spans if s.rank == rank] for rank in ranks]
    longest = max(max(s.end for s in group) - min(s.start for s in group) for group in groups)
    return 1 - busy / (len(ranks) * longest)


def in_flight_activations(schedule):
    """Return, for each rank, the most activations that it holds at once, by stage and micro-batch.

    They are held from F until B is done, or until W is done if B is split into I and W. (I already
    frees some of them. How many depends on the model, so all are counted.)
    Lab: 09
    """
    peaks = []
    for actions in schedule:
        count = peak = 0
        for action in actions:
            count += {"F": 1, "I": 0}.get(action.kind, -1)
            peak = max(peak, count)
        peaks.append(peak)
    return peaks


def memory_line(spans, rank):
    """List (time, activations that `rank` holds from then on), counted as in_flight_activations.

    An F holds its memory from its start.
    """
    changes = Counter()
    for span in spans:
        if span.rank == rank:
            kind = span.action.kind
            changes[span.start if kind == "F" else span.end] += {"F": 1, "I": 0}.get(kind, -1)
    line, count = [], 0
    for time in sorted(changes):
        count += changes[time]
        line.append((time, count))
    return line
