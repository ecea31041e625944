"""Detectors of diseases in split models: masks, copies, shards and their norms.

A detector takes the Ranks of a run (trace.py); it returns its evidence, a sentence, or None.
"""

import itertools
import math
from collections import Counter, defaultdict
from itertools import combinations

from ranklab.clinic import detectors
from ranklab.clinic.replicas import (
    MOST, copies, is_constant, name_of, replicas, targets_of, together)

LEAST = 64  # numbers: with fewer, two may be equal by chance
ROUNDED = 1e-2  # largest relative error of a norm in bfloat16


def dropout_seeds(ranks):
    """Find dropout masks that are equal where they must differ, or differ where they must be equal.
    """
    for a, b in combinations(ranks, 2):
        alike = split = count = split_with_same_data = 0
        for x, y in together([a, b]):
            has_same_data = targets_of(x) == targets_of(y)
            for (mask_a, input_a), (mask_b, input_b) in zip(x.masks, y.masks):
                count += 1
                alike += mask_a == mask_b and input_a != input_b and not has_same_data
                is_split = mask_a != mask_b and input_a == input_b and input_a is not None
                split += is_split
                split_with_same_data += is_split and has_same_data and bool(targets_of(x))
        if count and alike >= MOST * count:
            return (f"ranks {a.number} and {b.number} have different data, and drop the same "
                    f"places in {alike} of {count} masks")
        if (split >= 3 or split_with_same_data) and not replicas([a, b]):
            return (f"ranks {a.number} and {b.number} hold the same numbers, and drop different "
                    f"ones of them {split} times ({count} masks)")
    return None


def tied_weights(ranks):
    """Find an embedding matrix that is equal to another matrix at first, but not later."""
    first = [(r, i, digest) for r in ranks if r.steps
             for i, digest in enumerate(r.steps[0].weights)
             if digest.numel >= LEAST and not is_constant(digest)]
    for r, i, digest in first:
        if i not in r.steps[0].embeddings:
            continue
        for peer, j, twin in first:
            if twin.bits == digest.bits and twin.numel == digest.numel and (
                    j not in peer.steps[0].embeddings) and (peer, j) != (r, i):
                ends = _last(r, i, peer, j)
                if ends[0].bits != ends[1].bits:
                    return (f"{name_of(r.steps[0], i)} of rank {r.number} and "
                            f"{name_of(peer.steps[0], j)} of rank {peer.number} are the same at "
                            f"the start; at the last step their norms are {ends[0].norm:.4f} and "
                            f"{ends[1].norm:.4f}, their sums {ends[0].sum:.3f} and "
                            f"{ends[1].sum:.3f}")
    return None


def stale_weights(ranks):
    """Find a model that computes with older weights than its optimizers hold.

    A step that does not wait for a reduction also counts.
    """
    for r in ranks:
        lines = Counter(line for step in r.steps for line in {*step.pending})
        if lines:
            line, times = lines.most_common(1)[0]
            return (f"in {times} of {len(r.steps)} steps the optimizer of rank {r.number} works "
                    f"before anybody has waited for the reduction that begins at {line}")
    sums = [[step.sums for step in steps] for steps in zip(*(r.steps for r in ranks))]
    sums = [of_ranks for of_ranks in sums if all(of_ranks)]
    if len(sums) < 4:
        return None
    used = [of_ranks[0][0] for of_ranks in sums]
    for held in ([of_ranks[0][1] for of_ranks in sums],
                 [sum(held for _, held in of_ranks) for of_ranks in sums]):
        near = 1e-9 * max(map(abs, held))  # the error of a sum of numbers of both signs
        fresh = [math.isclose(a, b, rel_tol=1e-9, abs_tol=near) for a, b in zip(used, held)]
        behind = detectors.steps_behind(used, held)
        if behind == 0 or sum(fresh) > len(fresh) / 2:
            return None
        if fresh[0] and held[0] and behind:
            return (f"in {len(fresh) - sum(fresh)} of {len(fresh)} steps the model's weights are "
                    f"{behind} step(s) older than those that the optimizers hold. In step 2 they "
                    f"add up to {used[2]:.6g} in the model and, in its dtype, {held[2]:.6g} in "
                    "the optimizers")
    return _never_copied(ranks)


def _never_copied(ranks):
    """Find weights that never change in the model, although the optimizer's equal copies do."""
    return next((evidence for r in ranks
                 if (evidence := _whole_model_stays(r) or _weight_stays(r))), None)


def _whole_model_stays(rank):
    norms = [step.norms for step in rank.steps if step.norms]
    used, held = zip(*norms) if len(norms) > 4 else ((), ())
    if used and used[0] and len({*used}) == 1 and len({*held}) == len(held) and (
            math.isclose(used[0], held[0], rel_tol=ROUNDED)):
        return (f"on rank {rank.number} the model's weights are those of the start in "
                f"{len(used)} steps, with a norm of {used[0]:.6g}; those that its optimizers hold "
                f"began with {held[0]:.6g} and have {held[-1]:.6g} in the end")
    return None


def _weight_stays(rank):
    """Find one such weight of the model whose copy in the optimizer changes, as others' do.

    A model of which no weight changes may be another one, such as a target network.
    """
    steps = [step for step in rank.steps if step.twins and step.weights]
    norms_of = defaultdict(set)
    for step in steps:
        for name, _, norm in step.twins:
            norms_of[name].add(norm)
    if len(steps) <= 4 or max(map(len, norms_of.values()), default=0) <= 4:
        return None
    for name, numel, start in steps[0].twins:
        masters = [i for i, digest in enumerate(steps[0].weights) if digest.numel == numel
                   and math.isclose(digest.norm, start, rel_tol=ROUNDED)]
        changes = [i for i in masters if len({step.weights[i].norm for step in steps}) > 4]
        if len(norms_of[name]) == 1 and masters and masters == changes:
            return (f"on rank {rank.number} {name} of the model keeps its norm of {start:.6g} for "
                    f"{len(steps)} steps; the optimizer's copy of it moves, to "
                    f"{steps[-1].weights[masters[0]].norm:.6g}")
    return None


def optimizer_before_sharding(ranks):
    """Find an optimizer whose parameters the model no longer uses."""
    for r in ranks:
        steps = [step for step in r.steps if step.final]
        idle = [i for i in range(len(steps[0].final)) if not any(
            i < len(step.final) and step.final[i] for step in steps)] if steps else []
        outside = min((step.outside for step in steps), default=0)
        if idle and outside:
            return (f"on rank {r.number} {len(idle)} of {len(steps[0].final)} parameters of the "
                    f"optimizer had no gradient in {len(steps)} steps, and {outside} parameters "
                    "of the model have one and are in no optimizer")
    return None


def shard_norm(ranks):
    """Find ranks that each clip by the norm of only their own part of the gradient."""
    if any(len(group) == len(ranks) for group in copies(ranks)):
        return None  # nothing is sharded
    for gradients, clause in ((_final, "that its optimizer takes"),
                              (_contributions, "that it gives to others")):
        norms = [_own_norms([gradients(r, step) for r, step in zip(ranks, steps)])
                 for steps in together(ranks)]
        limit = detectors.own_limit(norms)
        if limit:
            count = sum(norm >= limit * 0.999 for step in norms for norm in step)
            return (f"the gradient of a rank {clause} has a norm of {limit:.4g} in {count} of "
                    f"{sum(map(len, norms))} cases and never a larger one: each rank clips by "
                    "its own")
    return None


def _own_norms(of_ranks):
    """Return the norms of the ranks' gradients, without parts that are equal on all ranks, which
    clipping by each rank's own norm would change. Ranks with the same gradient count once.
    """
    alike = [len({digest.bits for digest in digests}) == 1 for digests in zip(*of_ranks)]
    shards = [[m for m, is_alike in itertools.zip_longest(digests, alike) if m and not is_alike]
              for digests in of_ranks if digests]
    return list({tuple(m.bits for m in digests): math.hypot(*(m.norm for m in digests))
                 for digests in shards}.values())


def _final(rank, step):
    return [digest for digest in step.final if digest]


def _contributions(rank, step):
    return [call.digest for call in rank.calls if call.step == step.number and call.backwards
            and call.kind in ("reduce_scatter", "all_reduce") and not call.in_backward
            and call.digest.numel > 1]


def _last(rank, place, peer, peer_place):
    """Return both digests at the last step for which both are known: one rank may have gone on."""
    pairs = [(a.weights[place], b.weights[peer_place]) for a, b in zip(rank.steps, peer.steps)
             if len(a.weights) > place and len(b.weights) > peer_place
             and a.optimizer == rank.steps[0].optimizer and b.optimizer == peer.steps[0].optimizer]
    return pairs[-1]


DETECTORS = {each.__name__: each for each in (
    dropout_seeds, tied_weights, stale_weights, optimizer_before_sharding, shard_norm)}
WHOLE = ()
