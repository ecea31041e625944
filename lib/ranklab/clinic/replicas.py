"""What ranks have in common: matching steps, gradients, data, and initial weights."""

import math
from collections import defaultdict

MOST = 0.8  # share of the steps that must show a disease


def together(ranks):
    """Line up the steps of these ranks: [(the first step of each rank), ...].

    A step is left out if one of the ranks has no digests for it.
    """
    steps = zip(*(r.steps for r in ranks))
    return [each for each in steps if all(step.final for step in each)]


def replicas(ranks):
    """List the groups of two or more ranks whose gradients of all parameters are always equal.

    Gradients that are all 0, or not finite, are no evidence.
    """
    groups = defaultdict(list)
    for r in ranks:
        finals = [[digest and digest.bits for digest in step.final]
                  for step in r.steps if step.final]
        if any(digest and 0 < digest.norm < math.inf for step in r.steps for digest in step.final):
            groups[str(finals[:10])].append(r)
    return [group for group in groups.values() if len(group) > 1]


def copies(ranks):
    """List the groups of two or more ranks that had the same weights at their first step.

    A weight whose numbers are all equal, like a new bias, is no evidence.
    """
    groups = defaultdict(list)
    for r in ranks:
        weights = r.steps[0].weights if r.steps else []
        if not all(map(is_constant, weights)):
            key = [(digest.numel, None if is_constant(digest) else digest.bits)
                   for digest in weights]
            groups[str(key)].append(r)
    return [group for group in groups.values() if len(group) > 1]


def repeats_a_batch(step):
    """Return whether a batch entered the model twice, as in L-BFGS or sharpness-aware training."""
    batches = list(map(str, step.rows))
    return len(set(batches)) < len(batches)


def with_same_data(ranks):
    """List the groups of two or more ranks with the same batches, like parts of a split model."""
    groups = defaultdict(list)
    for r in ranks:
        batches = [(step.rows, targets_of(step)) for step in r.steps[:10]]
        if sum(any(each) for each in batches) > len(batches) / 2:
            groups[str(batches)].append(r)
    return [group for group in groups.values() if len(group) > 1]


def is_constant(digest):
    """Return whether all numbers of the tensor are equal, as in a norm layer at the start."""
    return math.isclose(digest.sum**2, digest.norm**2 * digest.numel, rel_tol=1e-9)


def gives_gradient(call):
    """Return whether a call reduces gradients, not a single number such as a loss."""
    return "reduce" in call.kind and (call.in_backward or call.backwards > 0) and (
        call.digest.numel > 1)


def targets_of(step):
    """List the bits of the targets of each loss in the step."""
    return [loss.targets for loss in step.losses]


def name_of(step, place):
    return step.names[place] or f"parameter {place}"


def list_of(numbers):
    return ", ".join(f"{number:.4g}" for number in numbers)
