"""Detectors of diseases of the training itself: it finishes, but its result is wrong.

A detector takes the Ranks of a run (trace.py); it returns its evidence, a sentence, or None.
"""

import math
from collections import defaultdict
from itertools import combinations
from statistics import median

from ranklab.clinic.replicas import (
    MOST, NEAR, copies, gives_gradient, list_of, most_apart, replicas, shares, targets_of,
    together)
from ranklab.engine.report import rank_names

UNEVEN = 1.1  # ratio of weights: 22 of 64 examples on one of three ranks are not a disease


def unsynchronised_start(ranks):
    """Find ranks that take the same steps from different weights."""
    part_of = {r.number: i for i, group in enumerate(copies(ranks)) for r in group}
    for group in replicas(ranks):
        if len({part_of.get(r.number) for r in group} - {None}) > 1:
            continue  # a grid, whose gradients are combined along a wrong axis
        first = [r.steps[0] for r in group]
        places = [place for place, digests in enumerate(zip(*(step.weights for step in first)))
                  if len({digest.bits for digest in digests}) > 1]
        if places:
            return (f"at the first step {len(places)} of {len(first[0].weights)} parameters differ "
                    f"between {rank_names(r.number for r in group)}, which then take the same "
                    f"gradient: {most_apart(first, places)}")
    return None


def same_data(ranks):
    """Find ranks that add up their gradients although they compute them from the same data.

    A sampler that shuffles every epoch into the same order also counts.
    """
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
    """Return whether both ranks have the same input to each reduce_scatter of the first steps."""
    digests = [[call.digest.bits for call in r.calls if call.kind == "reduce_scatter"][:20]
             for r in (a, b)]
    return bool(digests[0]) and digests[0] == digests[1]


def token_mean(ranks):
    """Find steps in which an example has more weight on one rank, or in one backward, than another.
    """
    ratios = []  # (largest weight / smallest weight, loss of the smallest, of the largest)
    groups = replicas(ranks)
    for group in groups or [ranks] * any(
            gives_gradient(call) for r in ranks for call in r.calls):
        for steps in together(group):
            losses = [loss._replace(weight=loss.weight * step.unscale)
                      for step in steps for loss in step.losses if loss.count]
            if len({step.backwards for step in steps}) == 1 and losses and (
                    {len(step.losses) for step in steps} == {steps[0].backwards}):
                low = min(losses, key=lambda loss: loss.weight)
                high = max(losses, key=lambda loss: loss.weight)
                is_even = low.weight <= 0 or groups and not _are_added(steps)
                ratios.append((1 if is_even else high.weight / low.weight, low, high))
    uneven = [entry for entry in ratios if entry[0] > UNEVEN]
    if not uneven or len(uneven) < len(ratios) / 2:  # by chance, some steps are even
        return None
    times, low, high = max(uneven, key=lambda entry: entry[0])
    return (f"in {len(uneven)} of {len(ratios)} steps targets weigh differently: one of "
            f"{high.count:.0f} targets weighs {times:.2f} times as much as one of "
            f"{low.count:.0f} in the same step")


def _are_added(steps):
    """Return whether the optimizer's gradient is a multiple of the sum of all ranks' in this step.

    Otherwise they were changed before, as by a loss scale of each rank that is divided out again:
    then the weights in the losses say nothing about the gradient.
    """
    each = [*shares(steps).values()]
    if len(each) == 1:  # one number is always a multiple of another
        return any(math.isclose(each[0], share, rel_tol=NEAR) for share in (1, 1 / len(steps)))
    usual = median(each or [0])
    return bool(each) and median(abs(share - usual) for share in each) < NEAR / 2 * abs(usual)


def batch_norm(ranks):
    """Find ranks with the same weights that validate with different statistics."""
    by_place = defaultdict(dict)
    for r in ranks:
        for place, bits, norm in r.norms:
            by_place[place][r.number] = bits, norm
    cases = {place: means for place, means in by_place.items()
             if len({bits for bits, _ in means.values()}) > 1}
    if not cases or not replicas(ranks):
        return None
    last = max(by_place, key=lambda place: [int(number) for number in place.split(",")])
    if last not in cases:
        return None  # in the end they agree: statistics were being recomputed, layer by layer
    means = next(iter(cases.values()))
    return (f"in {len(cases)} of {len(by_place)} validations of a batch norm the ranks' running "
            f"means differ: their norms are {list_of(norm for _, norm in means.values())} on "
            f"{rank_names(means)}")


def learning_rate(ranks, beside):
    """Find a batch that has grown with the ranks while the learning rate has not, or the reverse.

    It compares this run with the run `beside`, on fewer ranks. It does not judge by how much the
    rate should grow.
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
    """Count the targets of step i, on all ranks with different targets."""
    data = {tuple(loss.targets for loss in r.steps[i].losses): r.steps[i].losses for r in run}
    return sum(loss.count for losses in data.values() for loss in losses)


DETECTORS = {each.__name__: each for each in (
    unsynchronised_start, same_data, learning_rate, batch_norm, token_mean)}
WHOLE = ("same_data", "batch_norm", "learning_rate")
