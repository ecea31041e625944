"""Detectors of diseases in the state of a run: numbers, memory, data files, checkpoints.

A detector takes the Ranks of a run (trace.py); it returns its evidence, a sentence, or None.
"""

import itertools
from collections import Counter
from statistics import median

LARGEST = 20  # times the largest number of all other batches: healthy data is never that large
LOUD = 5  # times the usual loss
LATE = 5  # steps that a save in a thread may come late
LOOKS = 50  # at the examples that have come
LEAST_GROWTH = 4096  # bytes a step


def fp16_nan(ranks):
    """Find weights that are not finite, or ranks that have skipped different steps."""
    half = " after work in float16" if any(r.half for r in ranks) else ""
    broken = {r.number: step.number for r in ranks for step in r.steps[::-1] if not step.finite}
    if broken:
        rank, step = min(broken.items(), key=lambda item: item[1])
        return f"after step {step} rank {rank} holds weights that are not finite{half}"
    counts = [len(r.steps) for r in ranks]
    if half and len(set(counts)) > 1 and all(r.fate == "returned" for r in ranks):
        return f"the ranks have taken {counts} steps{half}: some skipped one that others took"
    return None


def memory_growth(ranks):
    """Find a rank on which the memory in use after a step grows with each step."""
    for r in ranks:
        alive = [step.memory for step in r.steps][2:]
        growths = [b - a for a, b in zip(alive, alive[1:])]
        if len(growths) < 4:
            continue
        usual = median(growths)
        if usual >= LEAST_GROWTH and (
                sum(growth >= usual / 2 for growth in growths) >= 0.8 * len(growths)):
            return (f"on rank {r.number} what lives after a step grows by {usual / 1024:.0f} KiB a "
                    f"step, from {alive[0] / 1024:,.0f} KiB after step 2 to "
                    f"{alive[-1] / 1024:,.0f} KiB after step {len(alive) + 1}")
    return None


def corrupt_shard(ranks):
    """Find a batch with numbers unlike any other batch's, and a loss that shows it."""
    batches = [(step.largest, max(step.values, default=0), r.number, step.number)
               for r in ranks for step in r.steps if step.largest and step.values]
    if len(batches) < 8:
        return None
    usual = median(largest for largest, *_ in batches)
    usual_loss = median(loss for _, loss, *_ in batches)
    outliers = [batch for batch in batches if not batch[0] <= LARGEST * usual]
    if not outliers or len(outliers) > len(batches) / 10:
        return None
    largest, loss, rank, step = outliers[0]
    if loss <= LOUD * usual_loss:
        return None
    return (f"the batch of rank {rank} in step {step} has numbers up to {largest:.5g}, all batches "
            f"usually up to {usual:.3g}; its loss is {loss:.4g}, usually it is {usual_loss:.3g}")


def data_twice(ranks, before):
    """Find examples that are repeated after a resume before all others have been used as often.

    The resume is inside this run, or this run resumes the run `before`.
    """
    cut, count = max((_resume(r, ranks) for r in ranks if r.loads), default=(0, 0))
    old = _by_step(r.steps for r in before) + _by_step(r.steps[:count] for r in ranks)
    new = _by_step(r.steps[cut:] for r in ranks)
    times = dict.fromkeys((row for rows in old + new for row in rows), 0)
    if not times or not old or _most_apart(times, old)[0] > 1:
        return None  # no epochs: examples come by chance
    apart, after, often, seldom = _most_apart(times, new)
    if apart < 2:
        return None
    return (f"before the resume no example came twice more than another; {after} steps after it "
            f"{sum(n >= often for n in times.values())} of {len(times)} have come {often} times "
            f"or more and {sum(n <= seldom for n in times.values())} only {seldom} times")


def _resume(rank, ranks):
    """Return (steps before the rank's last load, number of these steps in the loaded file)."""
    steps, step, bits, _ = rank.loads[-1]
    if step is None:
        return steps, steps  # only weights, for example the best ones: the data go on
    at_save = min((number for r in ranks if (number := _step_of_save(r, bits)) is not None),
                  default=steps)
    is_of_steps = 0 < at_save - step <= LATE  # a thread saves a little later
    return steps, step if is_of_steps else at_save


def _by_step(ranks):
    """List the rows of step 0 on all these ranks, of step 1, ..."""
    return [[row for step in steps if step for batch in step.rows for row in batch]
            for steps in itertools.zip_longest(*ranks)]


def _most_apart(times, steps):
    """Return (how much more often some rows came than others, after how many of the steps, most
    often, least often), at the first moment when the difference is 2 or more; `times` is updated.
    One row in 50 at either end is left out, because a loader may drop its last batch.
    """
    for count, rows in enumerate(steps, 1):
        for row in rows:
            times[row] += 1
        if count == len(steps) or count % -(-len(steps) // LOOKS) == 0:
            ordered = sorted(times.values())
            seldom, often = (ordered[n] for n in (len(ordered) // 50, -1 - len(ordered) // 50))
            if often - seldom > 1:
                return often - seldom, count, often, seldom
    return 0, 0, 0, 0


def optimizer_not_restored(ranks, before):
    """Find a resume that reads the optimizer's moments, while its optimizer begins without them.

    An optimizer for which these moments are not, by their names and sizes, is no resume.
    """
    digests = {bits for r in [*ranks, *before] for _, _, bits, _ in r.saves}
    for r in ranks:
        for steps, _, bits, states in r.loads:
            first = next((step for step in r.steps if step.number >= steps), None)
            if bits in digests and first and steps not in r.restores and any(
                    _fits(state, first.begun) for state in states):
                return (f"after {steps} steps rank {r.number} reads a file that this training has "
                        f"saved, with the optimizer's state; no load_state_dict of an optimizer "
                        f"follows, and the next step, {first.number}, begins with an empty state")
    return None


def _fits(state, begun):
    """Return whether an optimizer that has begun with `begun` could have gone on from `state`."""
    sizes, own_sizes = (Counter(each[-1]) for each in (state, begun or state))
    return state[:-1] == begun[:-1] and (sizes <= own_sizes or own_sizes <= sizes)


def old_shard(ranks):
    """Find ranks that have read files of different steps."""
    for loads in zip(*(r.loads for r in ranks)):
        versions = [step if step is not None else _step_of_save(r, bits)
                    for r, (_, step, bits, _) in zip(ranks, loads)]
        if len(set(versions)) > 1 and None not in versions:
            return (f"at step {loads[0][0]} the ranks read files of different steps: "
                    + ", ".join(f"rank {r.number} of step {v}" for r, v in zip(ranks, versions)))
    return None


def _step_of_save(rank, bits):
    """Return the number of steps that the rank had taken when it saved this; None if it never did.
    """
    return next((steps for steps, _, save_bits, _ in rank.saves if save_bits == bits), None)


DETECTORS = {each.__name__: each for each in (
    fp16_nan, memory_growth, corrupt_shard, data_twice, optimizer_not_restored, old_shard)}
WHOLE = ("fp16_nan", "corrupt_shard", "data_twice", "optimizer_not_restored", "old_shard")
