"""Lab 09: right answers written from the stubs alone, by somebody who has not seen the library's.
"""

import bisect
import itertools
import math
from collections import Counter, defaultdict
import torch
import torch.distributed as dist
from ranklab.pipeline_parallel import Action, ScheduleRunner, check_counts


def gpipe_schedule__comprehension(stages, micro_batches):
    """A comprehension over kinds and micro-batches."""
    check_counts(stages=stages, micro_batches=micro_batches)
    return tuple(tuple(Action(kind, stage, m) for kind in "FB" for m in range(micro_batches))
                 for stage in range(stages))


def gpipe_schedule__append(stages, micro_batches):
    """Loops over micro-batches, one list for each rank."""
    if stages < 1 or micro_batches < 1:
        raise ValueError(f"stages={stages} and micro_batches={micro_batches} must be at least 1")
    ranks = [[] for _ in range(stages)]
    for kind in ("F", "B"):
        for m in range(micro_batches):
            for stage, actions in enumerate(ranks):
                actions.append(Action(kind=kind, stage=stage, micro_batch=m))
    return tuple(map(tuple, ranks))


def bubble_fraction__busy(spans, flush=True):
    """One minus the busy share."""
    spans = list(spans)
    first, last, busy = {}, {}, 0
    for span in spans:
        first[span.rank] = min(span.start, first.get(span.rank, span.start))
        last[span.rank] = max(span.end, last.get(span.rank, span.end))
        busy += span.end - span.start
    if flush:
        window = max(last.values()) - min(first.values())
    else:
        window = max(last[rank] - first[rank] for rank in first)
    return 1 - busy / (window * len(first))


def bubble_fraction__gaps(spans, flush=True):
    """Adds up the gaps between neighbouring spans, and what is missing at the ends."""
    of_rank = defaultdict(list)
    for span in spans:
        of_rank[span.rank].append((span.start, span.end))
    for times in of_rank.values():
        times.sort()
    begin = min(times[0][0] for times in of_rank.values())
    finish = max(max(end for _, end in times) for times in of_rank.values())
    longest = max(max(end for _, end in times) - times[0][0] for times in of_rank.values())
    idle = 0.0
    for times in of_rank.values():
        for (_, end), (start, _) in zip(times, times[1:]):
            idle += start - end
        own_first, own_last = times[0][0], times[-1][1]
        idle += (own_first - begin) + (finish - own_last) if flush \
            else longest - (own_last - own_first)
    return idle / (len(of_rank) * ((finish - begin) if flush else longest))


def one_f_one_b_schedule__phases(stages, micro_batches):
    """Warm-up, one and one, rest."""
    check_counts(stages=stages, micro_batches=micro_batches)
    schedule = []
    for s in range(stages):
        warm = min(stages - 1 - s, micro_batches)
        actions = [Action("F", s, m) for m in range(warm)]
        for m in range(micro_batches - warm):
            actions += [Action("F", s, warm + m), Action("B", s, m)]
        actions += [Action("B", s, m) for m in range(micro_batches - warm, micro_batches)]
        schedule.append(tuple(actions))
    return tuple(schedule)


def one_f_one_b_schedule__limit(stages, micro_batches):
    """A forward as long as there are fewer than stages - s in flight, otherwise a backward."""
    check_counts(stages=stages, micro_batches=micro_batches)

    def actions(s):
        forwards = backwards = 0
        while backwards < micro_batches:
            if forwards < micro_batches and forwards - backwards < stages - s:
                yield Action("F", s, forwards)
                forwards += 1
            else:
                yield Action("B", s, backwards)
                backwards += 1

    return tuple(tuple(actions(s)) for s in range(stages))


class PipelineExecutor__seed_gradient(ScheduleRunner):
    """The loss's backward is given its first gradient; isend and irecv."""

    def forward(self, action):
        _, stage, m = action
        x, targets = self.pieces[m]
        if stage > 0:
            x = self.take_activations(stage, m).detach().requires_grad_(torch.is_grad_enabled())
        output = self.stages[stage](x, targets)
        if stage == self.last:
            self.loss += output.detach() * self.weight
        else:
            self.activations_out[stage, m] = output.detach()
        if torch.is_grad_enabled():
            self.activations[stage, m] = x, output

    def backward(self, action):
        _, stage, m = action
        x, output = self.activations.pop((stage, m))
        if stage == self.last:
            gradient = torch.ones_like(output) * (self.weight * self.scale)
        else:
            gradient = self.take_gradients(stage, m)
        with self.deferral(action):
            output.backward(gradient)
        if stage > 0:
            self.gradients_out[stage, m] = x.grad

    def send(self, message):
        kind, stage, m, peer = message
        out = self.activations_out if kind == "SF" else self.gradients_out
        tensor = out.pop((stage, m)).contiguous()
        self.sends.append((dist.isend(tensor, group=self.group, group_dst=peer), tensor))

    def receive(self, message):
        kind, stage, m, peer = message
        tensor = self.new_hidden(self.pieces[m][0])
        places = self.activations_in if kind == "RF" else self.gradients_in
        places[stage, m] = dist.irecv(tensor, group=self.group, group_src=peer), tensor


class PipelineExecutor__weighted_loss(ScheduleRunner):
    """The loss is multiplied in the graph; messages by batch_isend_irecv; torch.autograd.backward.
    """

    def forward(self, action):
        _, stage, m = action
        inputs, targets = self.pieces[m]
        training = torch.is_grad_enabled()
        if stage == 0:
            hidden = inputs
        else:
            hidden = self.take_activations(stage, m).detach()
            if training:
                hidden.requires_grad_()
        output = self.stages[stage](hidden, targets)
        if stage == self.last:
            output = output * self.weight
            self.loss = self.loss + output.detach()
        else:
            self.activations_out[stage, m] = output.detach()
        if training:
            self.activations[stage, m] = (hidden, output)

    def backward(self, action):
        _, stage, m = action
        gradients = [None if stage == self.last else self.take_gradients(stage, m)]
        hidden, output = self.activations.pop((stage, m))
        with self.deferral(action):
            if stage == self.last:
                output = output * self.scale
            torch.autograd.backward([output], gradients)
        if hidden.requires_grad and stage:
            self.gradients_out[stage, m] = hidden.grad
            hidden.grad = None

    def send(self, message):
        kind, stage, m, peer = message
        places = {"SF": self.activations_out, "SB": self.gradients_out}[kind]
        tensor = places.pop((stage, m)).contiguous()
        handle, = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, group=self.group,
                                                     group_peer=peer)])
        self.sends.append((handle, tensor))

    def receive(self, message):
        kind, stage, m, peer = message
        inputs, _ = self.pieces[m]
        tensor = self.new_hidden(inputs)
        handle, = dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, group=self.group,
                                                     group_peer=peer)])
        {"RF": self.activations_in, "RB": self.gradients_in}[kind][stage, m] = handle, tensor


class StageExecutor__four_methods(PipelineExecutor__weighted_loss):
    """As in version 1: with messages of its own, and backward defers by itself."""


def interleaved_schedule__divmod(ranks, micro_batches, virtual):
    """Stage and micro-batch of the k-th forward and backward by arithmetic."""
    check_counts(ranks=ranks, micro_batches=micro_batches, virtual=virtual)
    if micro_batches % ranks:
        raise ValueError(f"micro_batches={micro_batches} must be a multiple of ranks={ranks}")
    total = micro_batches * virtual

    def place(kind, rank, k):
        turn, within = divmod(k, ranks)
        rounds, chunk = divmod(turn, virtual)
        if kind == "B":
            chunk = virtual - 1 - chunk
        return Action(kind, rank + chunk * ranks, rounds * ranks + within)

    schedule = []
    for rank in range(ranks):
        warm = min((virtual - 1) * ranks + 2 * (ranks - 1 - rank), total)
        actions = [place("F", rank, k) for k in range(warm)]
        for k in range(total):
            if warm + k < total:
                actions.append(place("F", rank, warm + k))
            actions.append(place("B", rank, k))
        schedule.append(tuple(actions))
    return tuple(schedule)


def interleaved_schedule__merged(ranks, micro_batches, virtual):
    """Two lists by nested loops over rounds, merged."""
    check_counts(ranks=ranks, micro_batches=micro_batches, virtual=virtual)
    if micro_batches % ranks:
        raise ValueError(f"micro_batches={micro_batches} must be a multiple of ranks={ranks}")
    rounds = [range(start, start + ranks) for start in range(0, micro_batches, ranks)]
    schedule = []
    for rank in range(ranks):
        stages = range(rank, ranks * virtual, ranks)
        forwards = [Action("F", s, m) for r in rounds for s in stages for m in r]
        backwards = [Action("B", s, m) for r in rounds for s in reversed(stages) for m in r]
        warm = min(len(forwards), (virtual - 1) * ranks + 2 * (ranks - 1 - rank))
        pairs = itertools.zip_longest(forwards[warm:], backwards)
        rest = [action for pair in pairs for action in pair if action is not None]
        schedule.append((*forwards[:warm], *rest))
    return tuple(schedule)


def zero_bubble_schedule__clock(stages, micro_batches):
    """Simulates a clock: each unit a rank does I, else F within its memory, else W, else it waits.
    """
    check_counts(stages=stages, micro_batches=micro_batches)
    P, M = stages, micro_batches
    schedule = [[] for _ in range(P)]
    done = {}
    F, I, W = [0] * P, [0] * P, [0] * P
    now = 0
    while sum(W) < P * M:
        chosen = []
        for s in range(P):
            m = I[s]
            can_i = m < F[s] and done["F", s, m] <= now and (
                s == P - 1 or done.get(("I", s + 1, m), math.inf) <= now)
            m = F[s]
            can_f = m < M and F[s] - W[s] < P and (
                s == 0 or done.get(("F", s - 1, m), math.inf) <= now)
            if can_i and I[s] < M:
                chosen.append(("I", s, I[s]))
            elif can_f:
                chosen.append(("F", s, F[s]))
            elif W[s] < I[s]:
                chosen.append(("W", s, W[s]))
        for kind, s, m in chosen:
            {"F": F, "I": I, "W": W}[kind][s] += 1
            done[kind, s, m] = now + 1
            schedule[s].append(Action(kind, s, m))
        now += 1
    return tuple(map(tuple, schedule))


def zero_bubble_schedule__late_w(stages, micro_batches):
    """1F1B with I for B; rank s is s weight gradients behind, and does them between the last I's.
    """
    check_counts(stages=stages, micro_batches=micro_batches)
    schedule = []
    for s in range(stages):
        warm = min(stages - 1 - s, micro_batches)
        actions = [Action("F", s, m) for m in range(warm)]
        forwards, late = warm, 0
        for m in range(micro_batches):
            if forwards < micro_batches:
                actions.append(Action("F", s, forwards))
                forwards += 1
            actions.append(Action("I", s, m))
            if m - late >= s or forwards == micro_batches and m >= micro_batches - warm:
                actions.append(Action("W", s, late))
                late += 1
        actions += [Action("W", s, m) for m in range(late, micro_batches)]
        schedule.append(tuple(actions))
    return tuple(schedule)


def split_stages__table(costs, stages):
    """Dynamic programming: the best largest sum for the first n layers in k stages."""
    if not 1 <= stages <= len(costs):
        raise ValueError(f"stages={stages} must be between 1 and the {len(costs)} layers")
    best = {(0, 0): (0, [])}
    for k in range(1, stages + 1):
        for n in range(k, len(costs) + 1):
            options = []
            for cut in range(k - 1, n):
                if (k - 1, cut) in best:
                    before, ranges = best[k - 1, cut]
                    options.append((max(before, sum(costs[cut:n])), cut))
            value, cut = min(options)
            best[k, n] = value, [*best[k - 1, cut][1], range(cut, n)]
    return best[stages, len(costs)][1]


def split_stages__bisection(costs, stages):
    """Bisection over all sums of neighbours, with a greedy split for each."""
    if not 1 <= stages <= len(costs):
        raise ValueError(f"stages={stages} must be between 1 and the {len(costs)} layers")
    n = len(costs)

    def greedy(most):
        found, start = [], 0
        for k in range(stages):
            total, end, keep = 0, start, stages - 1 - k
            while end < n - keep and (end == start or total + costs[end] <= most):
                total += costs[end]
                end += 1
            if total > most:
                return None
            found.append(range(start, end))
            start = end
        return found if start == n else None

    sums = set()
    for start in range(n):
        total = 0
        for cost in costs[start:]:
            total += cost
            sums.add(total)
    sums = sorted(sums)
    low, high = 0, len(sums) - 1
    while low < high:
        middle = (low + high) // 2
        if greedy(sums[middle]):
            high = middle
        else:
            low = middle + 1
    return greedy(sums[low])


def in_flight_activations__set(schedule):
    """A set of what is held; B in two halves is known by its W."""
    most = []
    for actions in schedule:
        halves = {(a.stage, a.micro_batch) for a in actions if a.kind == "W"}
        held, largest = set(), 0
        for kind, stage, m in actions:
            if kind == "F":
                held.add((stage, m))
                largest = max(largest, len(held))
            elif kind == "W" or kind == "B" and (stage, m) not in halves:
                held.discard((stage, m))
        most.append(largest)
    return most


def in_flight_activations__accumulate(schedule):
    """Running sums of +1 and -1."""
    step = {"F": 1, "B": -1, "I": 0, "W": -1}
    return [max(itertools.accumulate((step[a.kind] for a in actions), initial=0))
            for actions in schedule]


def stale_weights__count(schedule, stash=True):
    """A counter of backwards for each stage."""
    used = {}
    for actions in schedule:
        version = Counter()
        for action in actions:
            kind, stage, m = action
            if kind == "F":
                used[action] = version[stage]
            else:
                used[action] = used["F", stage, m] if stash else version[stage]
                version[stage] += 1
    return used


def stale_weights__positions(schedule, stash=True):
    """Bisects the positions of a stage's backwards in the rank's order."""
    used = {}
    for actions in schedule:
        backwards = defaultdict(list)
        for at, action in enumerate(actions):
            if action.kind == "B":
                backwards[action.stage].append(at)
        where = {action: at for at, action in enumerate(actions)}
        for action, at in where.items():
            if action.kind == "B" and stash:
                at = where[Action("F", action.stage, action.micro_batch)]
            used[action] = bisect.bisect_left(backwards[action.stage], at)
    return used
