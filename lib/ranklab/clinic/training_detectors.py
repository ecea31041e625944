"""Detectors of diseases of the training itself: it runs to its end, and is wrong."""

import math
from collections import defaultdict
from itertools import combinations
from statistics import median

from ranklab.engine.report import rank_names

MOST = 0.8  # of the steps must show it
UNEVEN = 1.1  # times the weight: 22 examples of 64 on one of three ranks are no disease


def wrong_reduction(ranks):
    """Numbers of ranks are put together by another operation than is meant."""
    return _largest_norm(ranks) or _sum_for_mean(ranks) or _scattered_sum(ranks)


def _largest_norm(ranks):
    """The largest of the ranks' norms is taken, where each has another part of the gradient."""
    for rank in ranks:
        for call in rank.calls:
            is_norm = call.norm > 0 and any(math.isclose(call.digest.sum, call.norm**power,
                                                         rel_tol=1e-4) for power in (1, 2))
            if call.kind == "all_reduce" and call.op == "MAX" and is_norm:
                norms = [peer_call.norm for r in ranks for peer_call in r.calls
                         if (peer_call.group, peer_call.number) == (call.group, call.number)]
                whole = math.hypot(*norms)
                if min(norms) < 0.999 * max(norms) and not replicas(ranks):
                    return (f"at {call.line} the largest of the ranks' norms is taken, "
                            f"{max(norms):.3g}; the norm of all their parts is {whole:.3g}")
    return None


def _sum_for_mean(ranks):
    """What an optimizer takes is R times the mean of what ranks had, and nobody meant a sum."""
    for group in replicas(ranks):
        total = [_weight_of_step(steps, _shares(steps)) for steps in together(group)]
        times = _whole_times(total, group)
        if times:
            return (f"{rank_names(r.number for r in group)} sum their gradients: each rank's loss "
                    f"is a mean, so a step is {times} times as long as one of their mean")
    return None


def _shares(steps):
    """For each parameter: what the optimizer takes, as a multiple of the sum of what ranks had; but
    for its clipping.
    """
    for place, final in enumerate(steps[0].final):
        local = [step.local[place] for step in steps if place < len(step.local)]
        if final and len(local) == len(steps) and all(local):
            total = sum(digest.dot for digest in local)
            if abs(total) > 1e-3 * sum(abs(digest.dot) for digest in local):
                yield final.dot / total / steps[0].clip


def _scattered_sum(ranks):
    """The same, where each rank keeps a part of the sum."""
    total = []
    for steps in together(ranks):
        factors = [step.factors for step in steps]
        if not all(len(each) == 1 and each[0] is not None for each in factors):
            return None
        numbers = [x for x in factors[0][0] if math.isclose(x, 1 / len(ranks), rel_tol=1e-6)]
        total.append(_weight_of_step(steps, [math.prod(numbers)]))
    times = _whole_times(total, ranks)
    return (f"at each step reduce_scatter sums the gradients of {len(ranks)} ranks, and nobody "
            f"divides: each rank's loss is a mean, so the sum is {times} times the mean") \
        if times else None


def _weight_of_step(steps, shares):
    """The weights that the examples of a step have in its gradient, added up: 1 for a mean."""
    data = {}
    for step in steps:  # ranks with the same targets, as in tensor parallelism, count once
        key = tuple(loss.targets for loss in step.losses)
        data[key] = sum(loss.count * loss.weight for loss in step.losses)
    shares = sorted(shares)
    return median(shares) * sum(data.values()) if shares else math.nan


def _whole_times(total, ranks):
    """The number of ranks, where nearly all steps are so many times as long as a mean's."""
    R = len(ranks)
    is_so = [math.isclose(each, R, rel_tol=0.02) for each in total if math.isfinite(each)]
    return R if R > 1 and is_so and sum(is_so) >= MOST * len(is_so) else None


def unsynchronised_start(ranks):
    """Ranks take the same steps from different weights."""
    for group in replicas(ranks):
        first = [r.steps[0] for r in group]
        apart = [place for place, digests in enumerate(zip(*(step.weights for step in first)))
                 if len({digest.bits for digest in digests}) > 1]
        if apart:
            place = apart[0]
            norms = [step.weights[place].norm for step in first]
            return (f"at the first step {len(apart)} of {len(first[0].weights)} parameters differ "
                    f"between {rank_names(r.number for r in group)}, which then take the same "
                    f"gradient: {name_of(first[0], place)} has norms {_list(norms)}")
    return None


def same_data(ranks):
    """Ranks that add up their gradients have made them of the same data."""
    for a, b in combinations(ranks, 2):
        pairs = [(x, y) for x, y in together([a, b]) if x.losses or any(x.rows)]
        alike = sum(targets_of(x) == targets_of(y) and x.rows == y.rows for x, y in pairs)
        if pairs and alike >= MOST * len(pairs) and (replicas([a, b]) or _scatter_alike(a, b)):
            return (f"ranks {a.number} and {b.number} step by the same gradient, and had the same "
                    f"batch in {alike} of {len(pairs)} steps")
    for rank in ranks:
        epochs = defaultdict(list)
        for sampler, epoch, shuffles in rank.passes:
            if shuffles:
                epochs[sampler].append(epoch)
        for each in epochs.values():
            if len(each) > 1 and len(set(each)) == 1:
                return (f"rank {rank.number} went {len(each)} times through its shuffled data, "
                        f"and each time the sampler's epoch was {each[0]}: the same order")
    return None


def _scatter_alike(a, b):
    """They give the same to each reduce_scatter of the first steps."""
    digests = [[call.digest.bits for call in r.calls if call.kind == "reduce_scatter"][:20]
             for r in (a, b)]
    return bool(digests[0]) and digests[0] == digests[1]


def token_mean(ranks):
    """In one step an example weighs more on one rank, or in one backward, than in another."""
    ratios = []  # (largest weight / smallest weight, loss of the smallest, of the largest)
    for group in replicas(ranks) or [ranks]:
        for steps in together(group):
            losses = [loss for step in steps for loss in step.losses if loss.count]
            if len({step.backwards for step in steps}) == 1 and losses and (
                    {len(step.losses) for step in steps} == {steps[0].backwards}):
                low = min(losses, key=lambda loss: loss.weight)
                high = max(losses, key=lambda loss: loss.weight)
                ratios.append((high.weight / low.weight if low.weight > 0 else 1, low, high))
    uneven = [entry for entry in ratios if entry[0] > UNEVEN]
    if not uneven or len(uneven) < MOST * len(ratios):
        return None
    times, low, high = max(uneven, key=lambda entry: entry[0])
    return (f"in {len(uneven)} of {len(ratios)} steps targets weigh differently: one of "
            f"{high.count:.0f} targets weighs {times:.2f} times as much as one of "
            f"{low.count:.0f} in the same step")


def batch_norm(ranks):
    """Ranks with the same weights validate with different statistics."""
    by_place = defaultdict(dict)
    for r in ranks:
        for place, bits, norm in r.norms:
            by_place[place][r.number] = bits, norm
    apart = {place: means for place, means in by_place.items()
             if len({bits for bits, _ in means.values()}) > 1}
    if not apart or not replicas(ranks):
        return None
    means = next(iter(apart.values()))
    return (f"in {len(apart)} of {len(by_place)} validations of a batch norm the ranks' running "
            f"means differ: their norms are {_list(norm for _, norm in means.values())} on "
            f"{rank_names(means)}")


def learning_rate(ranks, beside):
    """With more ranks the batch has grown, and the learning rate has not; or the reverse. Needs a
    run `beside` this one, on fewer ranks. By how much a rate should grow is not judged.
    """
    batches, rates = [], []
    for run in (beside, ranks):
        count = min((len(r.steps) for r in run), default=0)
        if not count:
            return None
        batches.append(median(_batch(run, i) for i in range(count)))
        rates.append(max(step.rate for r in run for step in r.steps))
    if min(batches) <= 0:
        return None
    growth, speedup = batches[1] / batches[0], rates[1] / rates[0]
    if (growth > 1.5) == (speedup > 1.2):
        return None
    return (f"on {len(ranks)} ranks a step has {batches[1]:.0f} targets, on {len(beside)} it has "
            f"{batches[0]:.0f}: {growth:.3g} times as many; the largest learning rate is "
            f"{rates[1]:.3g} and {rates[0]:.3g}")


def _batch(run, i):
    """Targets of step i, on all ranks that have some of their own."""
    data = {tuple(loss.targets for loss in r.steps[i].losses): r.steps[i].losses for r in run}
    return sum(loss.count for losses in data.values() for loss in losses)


DETECTORS = {each.__name__: each for each in (
    wrong_reduction, unsynchronised_start, same_data, learning_rate, batch_norm, token_mean)}
WHOLE = ("same_data", "batch_norm", "learning_rate")


# --- what ranks have in common --------------------------------------------------------------------

def together(ranks):
    """Step by step, the steps of these ranks that have digests."""
    steps = zip(*(r.steps for r in ranks))
    return [each for each in steps if all(step.final for step in each)]


def replicas(ranks):
    """Groups of two ranks or more that always take the same gradient for all that they train.

    Gradients that are all 0, or no numbers, say nothing of who has them.
    """
    groups = defaultdict(list)
    for r in ranks:
        finals = [[digest and digest.bits for digest in step.final]
                  for step in r.steps if step.final]
        if any(digest and 0 < digest.norm < math.inf for step in r.steps for digest in step.final):
            groups[str(finals[:10])].append(r)
    return [group for group in groups.values() if len(group) > 1]


def targets_of(step):
    """The bits of the targets of its losses."""
    return [loss.targets for loss in step.losses]


def name_of(step, place):
    return step.names[place] or f"parameter {place}"


def _list(numbers):
    return ", ".join(f"{number:.4g}" for number in numbers)
