"""Detectors of diseases of the training itself: it finishes, but its result is wrong.

A detector takes the Ranks of a run (trace.py); it returns its evidence, a sentence, or None.
"""

from collections import defaultdict
from itertools import combinations
from statistics import median

from ranklab.clinic.replicas import (
    MOST, copies, gives_gradient, list_of, name_of, replicas, targets_of, together)
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
            place = places[0]
            norms = [step.weights[place].norm for step in first]
            return (f"at the first step {len(places)} of {len(first[0].weights)} parameters differ "
                    f"between {rank_names(r.number for r in group)}, which then take the same "
                    f"gradient: {name_of(first[0], place)} has norms {list_of(norms)}")
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
    for group in replicas(ranks) or [ranks] * any(
            gives_gradient(call) for r in ranks for call in r.calls):
        for steps in together(group):
            losses = [loss for step in steps for loss in step.losses if loss.count]
            if len({step.backwards for step in steps}) == 1 and losses and (
                    {len(step.losses) for step in steps} == {steps[0].backwards}):
                low = min(losses, key=lambda loss: loss.weight)
                high = max(losses, key=lambda loss: loss.weight)
                ratios.append((high.weight / low.weight if low.weight > 0 else 1, low, high))
    uneven = [entry for entry in ratios if entry[0] > UNEVEN]
    if not uneven or len(uneven) < len(ratios) / 2:  # by chance, some steps are even
        return None
    times, low, high = max(uneven, key=lambda entry: entry[0])
    return (f"in {len(uneven)} of {len(ratios)} steps targets weigh differently: one of "
            f"{high.count:.0f} targets weighs {times:.2f} times as much as one of "
            f"{low.count:.0f} in the same step")


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
