"""Lab 09: right answers that differ from the library's. Each must pass."""

import bisect
import itertools
from collections import Counter, defaultdict

import torch
import torch.distributed as dist

from ranklab.pipeline_parallel import Action, parse_schedule
from ranklab.pipeline_parallel.executor import ScheduleRunner


def _refuse_below_1(*numbers):
    if min(numbers) < 1:
        raise ValueError(f"{numbers} must be 1 or more")


def gpipe_schedule__as_text(stages, micro_batches):
    _refuse_below_1(stages, micro_batches)
    line = " ".join(f"{kind}{m}" for kind in "FB" for m in range(micro_batches))
    return parse_schedule("\n".join([line] * stages))


def gpipe_schedule__lists(stages, micro_batches):
    _refuse_below_1(stages, micro_batches)
    return [[Action(kind, stage, m) for kind in "FB" for m in range(micro_batches)]
            for stage in range(stages)]


def one_f_one_b_schedule__by_what_is_held(stages, micro_batches):
    """A forward while there is room, else a backward."""
    _refuse_below_1(stages, micro_batches)
    schedule = [[] for _ in range(stages)]
    for stage, actions in enumerate(schedule):
        forwards = backwards = 0
        while backwards < micro_batches:
            if forwards < micro_batches and forwards - backwards < stages - stage:
                actions.append(Action("F", stage, forwards))
                forwards += 1
            else:
                actions.append(Action("B", stage, backwards))
                backwards += 1
    return schedule


def one_f_one_b_schedule__sorted(stages, micro_batches):
    """Sorted by the step in which each action would be done."""
    _refuse_below_1(stages, micro_batches)

    def step(stage, action):
        ahead = stages - stage - 1
        return (2 * action.micro_batch + (2 * ahead + 1 if action.kind == "B" else 0),
                action.kind == "F")

    return tuple(tuple(sorted((Action(kind, stage, m) for m in range(micro_batches)
                               for kind in "FB"), key=lambda a: step(stage, a)))
                 for stage in range(stages))


def interleaved_schedule__by_rounds(ranks, micro_batches, virtual):
    """Lists of rounds; a backward and a forward in turn."""
    _refuse_below_1(ranks, micro_batches, virtual)
    if micro_batches % ranks:
        raise ValueError(f"{micro_batches} is not a multiple of {ranks}")
    rounds = range(0, micro_batches, ranks)
    schedule = []
    for rank in range(ranks):
        first = [Action("F", stage * ranks + rank, begin + m) for begin in rounds
                 for stage in range(virtual) for m in range(ranks)]
        second = [Action("B", stage * ranks + rank, begin + m) for begin in rounds
                  for stage in reversed(range(virtual)) for m in range(ranks)]
        done, actions = min((virtual + 1) * ranks - 2 * rank - 1, len(first)), []
        actions += first[:done]
        for backward, forward in itertools.zip_longest(second, first[done:]):
            actions += [a for a in (backward, forward) if a]
        schedule.append(actions)
    return schedule


def zero_bubble_schedule__greedy(stages, micro_batches):
    """All ranks at once, step by step: I if it can be done, else F if there is room, else W."""
    _refuse_below_1(stages, micro_batches)
    room, done, time = min(stages, micro_batches), {}, 0
    schedule, count = [[] for _ in range(stages)], [Counter() for _ in range(stages)]

    def can(action, *needs):
        there = all(done.get(need, time) < time for need in needs)
        return action.micro_batch < micro_batches and there

    while any(c["W"] < micro_batches for c in count):
        for s, c in enumerate(count):
            F, I, W = (Action(kind, s, c[kind]) for kind in "FIW")
            after = [Action("I", s + 1, I.micro_batch)] if s + 1 < stages else []
            before = [Action("F", s - 1, F.micro_batch)] if s else []
            if can(I, Action("F", s, I.micro_batch), *after):
                chosen = I
            elif c["F"] - c["W"] < room and can(F, *before):
                chosen = F
            elif can(W, Action("I", s, W.micro_batch)):
                chosen = W
            else:
                continue
            c[chosen.kind] += 1
            schedule[s].append(chosen)
        for actions in schedule:
            if actions:
                done.setdefault(actions[-1], time)
        time += 1
    return schedule


def zero_bubble_schedule__w_at_once(stages, micro_batches):
    order = one_f_one_b_schedule__by_what_is_held(stages, micro_batches)
    return [[half for a in actions for half in (
        [a] if a.kind == "F" else [a._replace(kind="I"), a._replace(kind="W")])]
        for actions in order]


def bubble_fraction__idle_gaps(spans, flush=True):
    """The gaps between a rank's spans, and its two ends."""
    by_rank = defaultdict(list)
    for span in spans:
        by_rank[span.rank].append((span.start, span.end))
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    lengths, work = [], 0
    for each in by_rank.values():
        each.sort()
        work += sum(end - start for start, end in each)
        lengths.append(each[-1][1] - each[0][0])
    if not flush:
        return 1 - work / max(lengths) / len(lengths)
    idle = 0
    for each in by_rank.values():
        ends = [first] + [end for _, end in each]
        starts = [start for start, _ in each] + [last]
        idle += sum(start - end for start, end in zip(starts, ends))
    return idle / ((last - first) * len(by_rank))


def in_flight_activations__by_pairs(schedule):
    """Of each micro-batch, from when to when it is there."""
    peaks = []
    for actions in schedule:
        freed = {a[1:]: i for i, a in enumerate(actions) if a.kind in "BW"}
        made = {a[1:]: i for i, a in enumerate(actions) if a.kind == "F"}
        peaks.append(max(sum(made[key] <= i <= freed[key] for key in made)
                         for i in range(len(actions))))
    return tuple(peaks)


def stale_weights__by_index(schedule, stash=True):
    return {action: sum(a.kind == "B" and a.stage == action.stage for a in actions[
        : actions.index(action._replace(kind="F") if stash else action)])
        for actions in schedule for action in actions}


def split_stages__binary_search(costs, stages):
    """The least largest sum is found by trying; then stages are filled up to it."""
    if not 0 < stages <= len(costs):
        raise ValueError(f"{stages} stages of {len(costs)} layers")

    def fill(most):
        parts = [[0]]
        for layer in range(1, len(costs)):
            left, cost = len(costs) - layer, sum(costs[i] for i in parts[-1])
            if stages - len(parts) >= left or cost + costs[layer] > most:
                parts.append([layer])
            else:
                parts[-1].append(layer)
        return parts

    sums = sorted({sum(costs[a:b]) for a in range(len(costs)) for b in range(a + 1, len(costs) + 1)
                   if sum(costs[a:b]) >= max(costs)})
    return fill(sums[bisect.bisect_left(sums, True, key=lambda most: len(fill(most)) <= stages)])


def split_stages__all_cuts(costs, stages):
    if not 0 < stages <= len(costs):
        raise ValueError(f"{stages} stages of {len(costs)} layers")
    ways = ([range(a, b) for a, b in itertools.pairwise((0, *cut, len(costs)))]
            for cut in itertools.combinations(range(1, len(costs)), stages - 1))
    return min(ways, key=lambda parts: max(sum(costs[i] for i in part) for part in parts))


class StageExecutor__hook(ScheduleRunner):
    """A hook catches the gradient of the input."""

    def forward(self, action):
        _, stage, m = action
        x, targets = self.pieces[m]
        if stage > 0:
            x = self.take_activations(stage, m).detach()
            x.requires_grad = torch.is_grad_enabled()
            if x.requires_grad:
                x.register_hook(lambda g: self.gradients_out.update({(stage, m): g.clone()}))
        y = self.stages[stage](x, targets)
        if stage < self.last:
            self.activations_out[stage, m] = y.detach().clone(
                memory_format=torch.contiguous_format)
        else:
            self.loss = self.loss + self.weight * y.detach()
        if y.requires_grad:
            self.activations[stage, m] = x, y

    def backward(self, action):
        _, stage, m = action
        _, y = self.activations.pop((stage, m))
        if stage == self.last:
            (y * self.weight * self.scale).backward()
        else:
            torch.autograd.backward([y], [self.take_gradients(stage, m)])


class PipelineExecutor__batches(StageExecutor__hook):
    """batch_isend_irecv."""

    def start(self, how, tensor, peer):
        peer = peer if self.group is None else dist.get_global_rank(self.group, peer)
        handle, = dist.batch_isend_irecv([dist.P2POp(how, tensor, peer, self.group)])
        return handle, tensor

    def send(self, message):
        kind, stage, m, peer = message
        tensor = {"SF": self.activations_out, "SB": self.gradients_out}[kind].pop((stage, m))
        self.sends += [self.start(dist.isend, tensor.contiguous(), peer)]

    def receive(self, message):
        kind, stage, m, peer = message
        empty = torch.zeros_like(self.new_hidden(self.pieces[m][0]))
        started = self.start(dist.irecv, empty, peer)
        {"RF": self.activations_in, "RB": self.gradients_in}[kind][stage, m] = started


class PipelineExecutor__waits_for_the_last_message(PipelineExecutor__batches):
    """Before each send, the one before must have left."""

    def send(self, message):
        while self.sends:
            self.sends.pop()[0].wait()
        super().send(message)


class StageExecutor__autograd_grad(StageExecutor__hook):
    """Gradients by torch.autograd.grad, added up by hand."""

    def backward(self, action):
        _, stage, m = action
        x, y = self.activations.pop((stage, m))
        gradient = y.new_full(y.shape, self.weight * self.scale)
        if stage < self.last:
            gradient = self.take_gradients(stage, m)
        if not stage:
            y.backward(gradient)
            return
        parameters = self.leaves(y.grad_fn, x)
        found = torch.autograd.grad(y, [x, *parameters], gradient, allow_unused=True)
        self.gradients_out[stage, m] = found[0]
        for parameter, more in zip(parameters, found[1:]):
            if more is not None:
                parameter.grad = more if parameter.grad is None else parameter.grad + more

    def leaves(self, node, x, seen=None):
        """All leaves but x in the graph that ends in `node`."""
        seen, found = set() if seen is None else seen, []
        if node is None or node in seen:
            return found
        seen.add(node)
        leaf = getattr(node, "variable", None)
        found += [leaf] if leaf is not None and leaf is not x else []
        for inner, _ in node.next_functions:
            found += self.leaves(inner, x, seen)
        return found
