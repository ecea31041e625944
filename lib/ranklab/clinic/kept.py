"""Detectors of diseases of what is kept: shards, copies, memory, files, and what a resume reads."""

import math
from collections import Counter
from statistics import median

from ranklab.clinic.diagnose import own_limit, steps_behind
from ranklab.clinic.trained import together

LARGEST = 20  # times the largest number of all other batches: no data is so by itself
LOUD = 5  # times the usual loss
LEAST_GROWTH = 4096  # bytes a step


def stale_weights(ranks):
    """The model computes with weights that are older than those that the optimizers hold; or a
    reduction is not awaited before the step.
    """
    for r in ranks:
        lines = Counter(line for step in r.steps for line in step.pending)
        if lines:
            line, times = lines.most_common(1)[0]
            return (f"rank {r.number} steps {times} times while nobody has waited for the "
                    f"reduction that begins at {line}")
    sums = [[step.sums for step in steps] for steps in zip(*(r.steps for r in ranks))]
    sums = [each for each in sums if all(each)]
    if len(sums) < 4:
        return None
    used = [each[0][0] for each in sums]
    for held in ([each[0][1] for each in sums], [sum(one[1] for one in each) for each in sums]):
        near = 1e-9 * max(map(abs, held))  # a sum of numbers of both signs is no exacter
        fresh = [math.isclose(a, b, rel_tol=1e-9, abs_tol=near) for a, b in zip(used, held)]
        behind = steps_behind(used, held)
        if behind == 0 or sum(fresh) > len(fresh) / 2:
            return None
        if fresh[0] and held[0] and behind:
            return (f"in {len(fresh) - sum(fresh)} of {len(fresh)} steps the model's weights are "
                    f"{behind} step(s) older than those that the optimizers hold. In step 2 they "
                    f"add up to {used[2]:.6g} in the model and {held[2]:.6g} in the optimizers")
    return None


def optimizer_before_sharding(ranks):
    """The optimizer has parameters that the model no longer uses."""
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
    """Each rank clips by the norm of what it has itself."""
    for of, what in ((_final, "that its optimizer takes"), (_given, "that it gives to others")):
        norms = [list({tuple(mark.bits for mark in marks): math.hypot(*(m.norm for m in marks))
                       for r, step in zip(ranks, steps) if (marks := of(r, step))}.values())
                 for steps in together(ranks)]  # ranks with the same gradient count once
        limit = own_limit(norms)
        if limit:
            at = sum(norm >= limit * 0.999 for step in norms for norm in step)
            return (f"the gradient of a rank {what} has a norm of {limit:.4g} in {at} of "
                    f"{sum(map(len, norms))} cases and never a larger one: each rank clips by "
                    "its own")
    return None


def _final(rank, step):
    return [mark for mark in step.final if mark]


def _given(rank, step):
    return [call.mark for call in rank.calls if call.step == step.number and call.backwards
            and call.kind in ("reduce_scatter", "all_reduce") and not call.in_backward
            and call.mark.numel > 1]


def fp16_nan(ranks):
    """Weights are no numbers any more; or ranks have skipped different steps."""
    half = " after work in float16" if any(r.half for r in ranks) else ""
    bad = {r.number: step.number for r in ranks for step in r.steps[::-1] if not step.finite}
    if bad:
        rank, step = min(bad.items(), key=lambda each: each[1])
        return f"after step {step} rank {rank} holds weights that are not finite{half}"
    counts = [len(r.steps) for r in ranks]
    if half and len(set(counts)) > 1 and all(r.fate == "returned" for r in ranks):
        return f"the ranks have taken {counts} steps{half}: some skipped one that others took"
    return None


def memory_growth(ranks):
    """What lives after a step grows with each step."""
    for r in ranks:
        alive = [step.memory for step in r.steps][2:]
        grown = [b - a for a, b in zip(alive, alive[1:])]
        if len(grown) < 4:
            continue
        usual = median(grown)
        if usual >= LEAST_GROWTH and sum(each >= usual / 2 for each in grown) >= 0.8 * len(grown):
            return (f"on rank {r.number} what lives after a step grows by {usual / 1024:.0f} KiB a "
                    f"step, from {alive[0] / 1024:,.0f} KiB after step 2 to "
                    f"{alive[-1] / 1024:,.0f} KiB after step {len(alive) + 1}")
    return None


def corrupt_shard(ranks):
    """One batch has numbers that no other has, and its loss shows it."""
    batches = [(step.largest, max(step.values, default=0), r.number, step.number)
               for r in ranks for step in r.steps if step.largest and step.values]
    if len(batches) < 8:
        return None
    usual = median(each[0] for each in batches)
    usual_loss = median(each[1] for each in batches)
    bad = [each for each in batches if not each[0] <= LARGEST * usual]
    if not bad or len(bad) > len(batches) / 10:
        return None
    largest, loss, rank, step = bad[0]
    if loss <= LOUD * usual_loss:
        return None
    return (f"the batch of rank {rank} in step {step} has numbers up to {largest:.5g}, all batches "
            f"usually up to {usual:.3g}; its loss is {loss:.4g}, usually it is {usual_loss:.3g}")


def data_twice(ranks, before):
    """After a resume, examples come again that are not due yet. In one run, or with the run
    `before` that this one goes on with.
    """
    old, new = [step for r in before for step in r.steps], []
    for r in ranks:
        cut = r.loads[-1][0] if r.loads else 0
        old, new = old + r.steps[:cut], new + r.steps[cut:]
    first, both = _times(old), _times(old + new)
    if not first or both == first or max(first.values()) - min(first.values()) > 1:
        return None  # no epochs: examples come by chance
    most, least = max(both.values()), min(both.values())
    if most - least < 2:
        return None
    times = sorted(set(first.values()))
    return (f"before the resume each example had come {' or '.join(map(str, times))} times; now "
            f"{sum(n == most for n in both.values())} of {len(both)} have come {most} times, while "
            f"{sum(n == least for n in both.values())} have come {least} times")


def _times(steps):
    return Counter(row for step in steps for batch in step.rows for row in batch)


def old_shard(ranks):
    """Ranks have read files of different steps."""
    for loads in zip(*(r.loads for r in ranks)):
        versions = [said if said is not None else _save_of(r, bits)
                    for r, (_, said, bits) in zip(ranks, loads)]
        if len(set(versions)) > 1 and None not in versions:
            return (f"at step {loads[0][0]} the ranks read files of different steps: "
                    + ", ".join(f"rank {r.number} of step {v}" for r, v in zip(ranks, versions)))
    return None


def _save_of(rank, bits):
    """The steps that it had taken when it saved this."""
    return next((steps for steps, _, saved in rank.saves if saved == bits), None)


DETECTORS = {each.__name__: each for each in (
    stale_weights, optimizer_before_sharding, shard_norm, fp16_nan, memory_growth, corrupt_shard,
    data_twice, old_shard)}
WHOLE = ("fp16_nan", "corrupt_shard", "data_twice", "old_shard")
COMPARE = ("data_twice",)
