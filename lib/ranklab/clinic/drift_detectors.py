"""The detector of replicas that drift apart, and of the reason.

A detector takes the Ranks of a run (trace.py); it returns its evidence, a sentence, or None.
"""

import math
from itertools import combinations

from ranklab.clinic.replicas import copies, gives_gradient, list_of, most_apart, with_same_data
from ranklab.engine.report import rank_names


def replicas_drift(ranks):
    """Find ranks whose weights are equal at the start and do not stay equal."""
    for group in copies(ranks):
        is_of_one_batch = with_same_data(group) == [group]
        if not is_of_one_batch and any(map(_shares_a_model, group)) and (evidence := _drift(group)):
            return evidence
    for group in with_same_data(ranks):  # the parts of a split model, which share some weights
        if evidence := _drift(group, _whole_places([r.steps[0] for r in group])):
            return evidence
    return _trained_by_some(ranks)


def _drift(group, subset=None):
    """Return the evidence that these ranks' weights, or only the chosen ones, begin to differ."""
    steps = [each for each in zip(*(r.steps for r in group)) if all(step.weights for step in each)]
    gaps = [_places_apart(each, subset) for each in steps]
    first = next((i for i, places in enumerate(gaps) if places), None)
    if (not first or len(steps) - first < 3 or _is_split(group) or not _is_apart(steps[-1], gaps)
            or any(set(a) - set(b) for a, b in zip(gaps, gaps[1:]))  # averaged: as local SGD does
            or any(_gives_weights(r, steps[first][0].number) for r in group)):
        return None
    places, numbers = gaps[first], [r.number for r in group]
    subject = "all weights" if len(places) == len(steps[0][0].weights) else (
        f"{len(places)} of {len(steps[0][0].weights)} weights")
    start = "these weights whole" if subset else "the same weights"
    return (f"{rank_names(numbers)} begin with {start}; from step {steps[first][0].number} "
            f"on {subject} differ between them, and no step makes them alike again: "
            f"{most_apart(steps[-1], gaps[-1])} in the end. "
            + _why(group, steps[first - 1], steps[first], places))


def _places_apart(steps, subset):
    return [place for place, digests in enumerate(zip(*(step.weights for step in steps)))
            if len({digest.bits for digest in digests}) > 1
            and (subset is None or place in subset)]


def _is_apart(steps, gaps):
    """Return whether a weight differs in these steps by more than rounding may explain."""
    return any(abs(a.dot - b.dot) > 1e-5 * max(a.norm, b.norm) for place in gaps[-1]
               for a, b in combinations([step.weights[place] for step in steps], 2))


def _whole_places(first):
    """List the places of weights that are whole in all these steps, if others are split.

    Weights of experts, or of a module with a split weight, need not be equal: they are left out.
    """
    names, *rest = [step.names for step in first]
    is_same = [len({digest.bits for digest in digests}) == 1
               for digests in zip(*(step.weights for step in first))]
    split = {name.rpartition(".")[0] for name, same in zip(names, is_same) if not same}
    if any(step_names != names for step_names in rest) or not all(names) or not split:
        return []
    return [place for place, (name, same) in enumerate(zip(names, is_same))
            if same and name.rpartition(".")[0] not in split and "expert" not in name]


def _is_split(group):
    """Return whether the ranks hold parts of one model: stages that send messages, or experts."""
    return any(call.number < 0 or call.kind.startswith("all_to_all")
               for r in group for call in r.calls)


def _shares_a_model(rank):
    """Return whether the rank ever sends weights or gradients; an ensemble's members do not."""
    return any(call.kind in ("broadcast", "scatter") or call.in_backward or call.tensor
               for call in rank.calls if call.digest.numel > 1)


def _gives_weights(rank, step):
    """Return whether the rank communicates its weights after this step, as in local SGD."""
    totals = {each.number: (sum(digest.numel for digest in each.weights),
                            sum(digest.sum for digest in each.weights))
              for each in rank.steps if each.weights}
    for call in rank.calls:
        numel, total = totals.get(call.step, (0, 0.0))
        if call.step >= step and (call.tensor.startswith("weight") or (
                call.digest.numel == numel > 0
                and math.isclose(call.digest.sum, total, rel_tol=1e-3))):
            return True
    return False


def _why(group, before, after, places):
    """Return a sentence on which gradients were not reduced, or what else changed the weights."""
    number = before[0].number
    finals = [[step.final[place] for step in before] for place in places]
    if all(len({digest and digest.bits for digest in each}) == 1 for each in finals):
        loaders = [r.number for r in group if any(at == number + 1 for at, *_ in r.loads)]
        if loaders and len(loaders) < len(group):
            return (f"Their gradients were the same; after step {number} {rank_names(loaders)} "
                    "read a file, and the others did not")
        rates = [step.rate for step in before]
        if len(set(rates)) > 1:
            return f"Their gradients were the same, and their learning rates {list_of(rates)}"
        return f"Their gradients were the same: something after step {number} has changed weights"
    reduced = [call for r in group for call in r.calls
               if call.step == number and gives_gradient(call)]
    between = [call for call in reduced if group[1].number in group[0].groups.get(call.group, ())]
    if not between:
        note = f" (at {reduced[0].line} they are, in another group)" if reduced else ""
        return f"In step {number} no gradient was reduced between them{note}"
    last = max(call.backwards + call.in_backward for call in between)
    if last < before[0].backwards:
        return (f"In step {number} gradients were reduced in backward {last} of "
                f"{before[0].backwards}, and not after the last one")
    return f"In step {number} their gradients were not reduced, others were"


def _trained_by_some(ranks):
    """Find ranks with the same gradients, one of which trains more parameters of the same model."""
    with_steps = [r for r in ranks if r.steps and all(r.steps[0].names)]
    for a in with_steps:
        for b in with_steps:
            fewer, more = set(a.steps[0].names), set(b.steps[0].names)
            if fewer < more and a.steps[0].outside and b.steps[0].outside < a.steps[0].outside:
                finals = [{name: digest and digest.bits for name, digest
                           in zip(r.steps[0].names, r.steps[0].final) if name in fewer}
                          for r in (a, b)]
                if finals[0] == finals[1]:
                    left_out = [name for name in b.steps[0].names if name not in fewer]
                    return (f"rank {b.number} trains {len(left_out)} parameters that rank "
                            f"{a.number} has and does not train, such as {left_out[0]}, and both "
                            f"take the same gradient for the other {len(fewer)}")
    return None


DETECTORS = {"replicas_drift": replicas_drift}
WHOLE = ()
