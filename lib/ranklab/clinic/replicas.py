"""What ranks have in common: matching steps, gradients, data, and initial weights."""

import math
from collections import defaultdict

MOST = 0.8  # share of the steps that must show a disease
NEAR = 0.02  # rounding to bfloat16 in messages may change that much


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


def shares(steps):
    """Return {place of a parameter: the optimizer's gradient as a multiple of the sum of all ranks'
    in this step}, without places where the ranks' gradients cancel out, or are not known.

    The clipping and unscaling that the observer has seen are left out.
    """
    result = {}
    for place, final in enumerate(steps[0].final):
        dots = [dots[place] for step in steps for dots in step.local if dots[place] is not None]
        if final and abs(sum(dots)) > 1e-3 * sum(map(abs, dots)):
            result[place] = final.dot / sum(dots) / steps[0].clip / steps[0].unscale
    return result


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


def most_apart(steps, places):
    """Return what differs most between these steps' weights: "NAME has norms 1.02, 1.03".

    It gives the norms, or the sums if all norms are equal.
    """
    for kind in ("norm", "sum"):
        numbers = {place: [getattr(step.weights[place], kind) for step in steps]
                   for place in places}
        place, most = max(numbers.items(), key=lambda item: _gap(item[1]))
        if len({*most}) > 1:
            return f"{name_of(steps[0], place)} has {kind}s {list_of(most)}"
    return f"one of them is {name_of(steps[0], places[0])}"


def _gap(numbers):
    size = max(map(abs, numbers))
    return (max(numbers) - min(numbers)) / size if 0 < size < math.inf else 0.0


def list_of(numbers):
    return ", ".join(in_digits([*numbers]))


def in_digits(numbers):
    """List the numbers as texts: four digits, or more if unequal ones would look equal."""
    for digits in range(4, 18):
        texts = [f"{number:.{digits}g}" for number in numbers]
        if len({*texts}) == len({*numbers}):
            break
    return texts
