"""Detectors that compare the optimizers' gradients with those computed by the ranks' backwards.

A detector takes the Ranks of a run (trace.py); it returns its evidence, a sentence, or None.
"""

import math
from collections import Counter, defaultdict
from statistics import median

from ranklab.clinic.replicas import (
    MOST, NEAR, in_digits, name_of, repeats_a_batch, replicas, shares, together)
from ranklab.engine.report import rank_names

MANY = 8  # names that a list has at most


# --- combined by the wrong operation --------------------------------------------------------------

def wrong_reduction(ranks):
    """Find numbers of several ranks that are combined by the wrong operation, such as sum for mean.
    """
    return (_largest_norm(ranks) or _some_sums(ranks) or _sum_for_mean(ranks)
            or _scattered_sum(ranks))


def _largest_norm(ranks):
    """Find a maximum of the ranks' norms, although each rank has a different part of the gradient.
    """
    for rank in ranks:
        for call in rank.calls:
            is_norm = call.norm > 0 and any(math.isclose(call.digest.sum, call.norm**power,
                                                         rel_tol=1e-4) for power in (1, 2))
            if call.kind == "all_reduce" and call.op == "MAX" and is_norm:
                norms = [peer_call.norm for r in ranks for peer_call in r.calls
                         if (peer_call.group, peer_call.number) == (call.group, call.number)]
                if min(norms) < 0.999 * max(norms) and not replicas(ranks):
                    low, high = in_digits([min(norms), max(norms)])
                    return (f"at {call.line} the largest of the ranks' norms is taken, {high}; the "
                            f"smallest is {low}. Each rank has a part of the gradient, and the "
                            "norm of the whole is larger than that of any part")
    return None


def _sum_for_mean(ranks):
    """Find an optimizer that takes the sum of the ranks' gradients of mean losses. Or their mean,
    if each rank's loss is R times a mean; R is 3 or more, because 2 may be a factor of the loss.
    """
    for group in replicas(ranks):
        R, steps = len(group), together(group)
        by_share = {1: [], R: []}
        for each in steps:
            share, weights, K = _share(each), _weights(each), each[0].backwards
            if math.isclose(share, 1, rel_tol=NEAR):
                by_share[1].append(any(_is_near(x, R) or _is_near(x, R * K) for x in weights))
            elif math.isclose(share, 1 / R, rel_tol=NEAR) and K != R > 2:
                by_share[R].append(bool(weights) and all(_is_near(x, R * R) for x in weights))
        for divisor, is_sick in by_share.items():
            if R > 1 and is_sick and sum(is_sick) >= MOST * len(steps):
                fault = ("sum their gradients, and nobody divides: each rank's loss is a mean" if
                         divisor == 1 else f"average gradients of losses that are {R} times a mean")
                return (f"{rank_names(r.number for r in group)} {fault}, so the gradient is {R} "
                        f"times their mean ({sum(is_sick)} of {len(steps)} steps). {_effect(R)}")
    return None


def _some_sums(ranks):
    """Find parameters whose gradients are summed in the steps that average all others.

    All losses must be means, and a gradient that is the same on all ranks is no evidence.
    """
    for group in replicas(ranks):
        R, steps, by_place = len(group), together(group), defaultdict(list)
        for each in steps:
            weights = _weights(each)
            if weights and all(_is_near(weight, R) for weight in weights):
                for place, share in shares(each).items():
                    if len({str([dots[place] for dots in step.local]) for step in each}) == R:
                        by_place[place].append(share)
        usual = {place: median(each) for place, each in by_place.items()
                 if len(each) > 3 and len(each) >= MOST * len(steps)
                 and sum(_is_near(share, median(each)) for share in each) >= MOST * len(each)}
        summed = [place for place, share in usual.items() if _is_near(share, 1)]
        if summed and len(summed) < len(usual) and all(
                _is_near(share, 1 if place in summed else 1 / R) for place, share in usual.items()):
            names = [name_of(steps[0][0], place) for place in summed]
            return (f"{rank_names(r.number for r in group)} average the gradients of "
                    f"{len(usual) - len(summed)} parameters, but sum those of {len(summed)}, and "
                    f"nobody divides: each rank's loss is a mean, so these gradients are {R} times "
                    f"their mean. They are {', '.join(names[:MANY])}"
                    + f" and {len(names) - MANY} others" * (len(names) > MANY))
    return None


def _effect(times):
    """Return a sentence on steps whose gradient is this many times too large."""
    return f"Without clipping, SGD's steps are {times} times as long; Adam's hardly change"


def _scattered_sum(ranks):
    """Find a sum instead of a mean, as in _sum_for_mean, if each rank keeps a part of the sum."""
    R, is_sick = len(ranks), []
    for steps in together(ranks):
        factors = [step.factors for step in steps]
        if not all(len(each) == 1 and each[0] is not None for each in factors):
            return None
        is_divided = any(math.isclose(x, 1 / R, rel_tol=1e-6) for x in factors[0][0])
        is_sick.append(not is_divided and any(_is_near(weight, R) for weight in _weights(steps)))
    if R > 1 and is_sick and sum(is_sick) >= MOST * len(is_sick):
        return (f"at each step reduce_scatter sums the gradients of {R} ranks, and nobody "
                f"divides: each rank's loss is a mean, so the sum is {R} times the mean")
    return None


def micro_steps_summed(ranks):
    """Find steps that sum the gradients of micro-steps whose losses are means."""
    for group in replicas(ranks) or [[r] for r in ranks]:
        R, steps = len(group), together(group)
        accumulated = [each for each in steps if _micro_steps(each) > 1]
        is_sick = []
        for each in accumulated:
            share, K = _share(each), _micro_steps(each)
            of_all = R if math.isclose(share, 1, rel_tol=NEAR) else 1  # also a sum over ranks
            is_sick.append(
                any(math.isclose(share, x, rel_tol=NEAR) for x in (1, 1 / R)) and any(
                    _is_near(weight, R * K / of_all) for weight in _weights(each)))
        if accumulated and sum(is_sick) >= MOST * len(steps):
            K = _micro_steps(accumulated[0])
            return (f"in {sum(is_sick)} of {len(steps)} steps the gradients of {K} micro-steps are "
                    f"added up, whose losses are means, and no loss is divided by {K}: the "
                    f"gradient is {K} times their mean. {_effect(K)}")
    return None


def micro_steps_lost(ranks):
    """Find steps whose first micro-steps are missing from the optimizer's gradient."""
    for group in replicas(ranks) or [[r] for r in ranks]:
        steps = together(group)
        lost = [count for each in steps if (count := _lost(each))]
        if lost and len(lost) >= MOST * len(steps):
            K = _like_backwards(steps[0])
            return (f"in {len(lost)} of {len(steps)} steps the optimizer takes the gradient of the "
                    f"last {K - lost[0]} of {K} micro-steps alone: that of the other {lost[0]} is "
                    "lost, as by a zero_grad() between them")
    return None


def _lost(steps):
    """Return how many of the first backwards are missing in the gradient; 0 if it is not known."""
    K, R = _like_backwards(steps), len(steps)
    if K < 2 or repeats_a_batch(steps[0]):
        return 0
    misses = {}  # (backwards left out, factor) -> how far off, for each parameter
    for place, final in enumerate(steps[0].final):
        dots = [sum(step.local[k][place] or 0 for step in steps) for k in range(K)]
        if final and any(dots):
            step_dot = final.dot / steps[0].clip / steps[0].unscale
            for count in range(K):
                for factor in {1, 1 / R}:
                    misses.setdefault((count, factor), []).append(
                        abs(step_dot - factor * sum(dots[count:])) / factor / sum(map(abs, dots)))
    if not misses:
        return 0
    errors = {key: median(each) for key, each in misses.items()}
    count, factor = min(errors, key=errors.get)
    is_sure = errors[count, factor] < NEAR / 2 and min(errors[0, x] for x in {1, 1 / R}) > 2 * NEAR
    return count if is_sure else 0


def _micro_steps(steps):
    """Return the number of similar backwards in a step if they begin at one line, else 1."""
    lines = {line for step in steps for line in step.begins}
    return _like_backwards(steps) if len(lines) == 1 else 1


def _like_backwards(steps):
    """Return the number of backwards in a step if they reach the same parameters, else 1."""
    K = len(steps[0].local)
    gradients = {sum(dot is not None for dot in dots) for step in steps for dots in step.local}
    counts = {count for step in steps for count in step.reached}
    is_one = len(gradients) == len(counts) == 1 and gradients != {0}
    return K if is_one and {len(step.local) for step in steps} == {K} else 1


def _share(steps):
    """Return the optimizer's gradient as a multiple of the sum of all ranks' in this step."""
    return median(shares(steps).values() or [math.nan])


def _weights(steps):
    """Return, for each kind of loss, the sum of the weights of all ranks' and backwards' targets.

    It is R for a mean over R ranks: the division comes later. Ranks with the same targets, as in
    tensor parallelism, count once.
    """
    data, total = {}, Counter()
    for step in steps:
        data[tuple(loss.targets for loss in step.losses)] = step
    for step in data.values():
        count, rest = divmod(len(step.losses), max(step.backwards, 1))
        for i, loss in enumerate(step.losses):
            total[i if rest else i % count] += loss.count * loss.weight * step.unscale
    return [*total.values()]


def _is_near(weight, number):
    return math.isclose(weight, number, rel_tol=NEAR)


# --- what happens to a gradient on its way --------------------------------------------------------

def change_in_flight(ranks):
    """Find a tensor that is changed while a collective may still read it."""
    for r in ranks:
        if r.changes:
            (tensor, start, change), times = Counter(map(tuple, r.changes)).most_common(1)[0]
            return (f"on rank {r.number} {tensor} is given to a collective at {start} and changed "
                    f"at {change} before anybody has waited for it ({len(r.changes)} changes): "
                    "what the others get may be of before or after")
    return None


def unused_parameters(ranks):
    """Find parameters that a step did not use, although DDP waits for their gradients."""
    group = [r for r in ranks if "Expected to have finished reduction" in r.fate]
    for r in group:
        last = next((step for step in reversed(r.steps) if step.final), None)
        idle = [name_of(last, i) for i, digest in enumerate(last.final if last else ())
                if not digest]
        if idle:
            return (f"in step {last.number} {len(idle)} of {len(last.final)} parameters of rank "
                    f"{r.number} had no gradient, such as {idle[0]}, and DistributedDataParallel "
                    f"waits for all of them: {rank_names(each.number for each in group)} raised an "
                    "error in the next forward. It has find_unused_parameters=True for that")
    return None


def no_gradient(ranks):
    """Find a rank whose backward runs although its optimizer has no gradient, so nothing changes.
    """
    for r in ranks:
        steps = [step for step in r.steps if step.final and step.backwards]
        if len(steps) > 3 and not any(any(step.final) or step.outside for step in steps):
            return (f"in {len(steps)} steps rank {r.number} came to "
                    f"{sum(step.backwards for step in steps)} backward(s), and none of the "
                    f"{len(steps[0].final)} parameters of its optimizer had a gradient")
    return None


DETECTORS = {each.__name__: each for each in (
    wrong_reduction, micro_steps_summed, micro_steps_lost, change_in_flight, unused_parameters,
    no_gradient)}
WHOLE = ()
