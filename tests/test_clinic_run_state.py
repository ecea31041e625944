"""Lab 16, what a run keeps: the broken programs show what is told of them, and so do the others of
the same cause. (That the mended ones equal one process is what the checks compare.)
"""

import math
from collections import Counter

import pytest
import torch.nn as nn

from ranklab import launch
from ranklab.clinic.case import edited_program
from ranklab.clinic.run_state import CASES, half_digits
from ranklab.meter import MemoryCurve

pytestmark = [pytest.mark.timeout(120), pytest.mark.sweep]  # a story's numbers
HALF, VALIDATED, STORED, RESUMED, SPLIT = CASES


def losses(program, ranks=4, **settings):
    """Of all ranks."""
    return [found["losses"] for found in launch(lambda: program(**settings), ranks=ranks)]


def first_nan(row):
    return next((step for step, loss in enumerate(row) if math.isnan(loss)), None)


def test_float16_is_nan_on_some_ranks_first_and_never_on_one():
    steps = [first_nan(row) for row in losses(HALF.broken())]
    assert max(steps) - min(steps) == 1 and min(steps) > 8
    later = [first_nan(row) for row in losses(HALF.broken(), scale=2.0**14, steps=30)]
    assert min(later) > max(steps)  # a smaller scale puts it off
    assert first_nan(losses(HALF.broken(), ranks=1)[0]) is None
    for program, different in ((HALF.variant(), True), (half_digits, False)):
        scales = {found["scale"] for found in launch(program, ranks=4)}
        assert (len(scales) > 1) == different


def peaks(program, **settings):
    """The peak bytes of 4 steps and of 8, on this rank."""
    found = []
    for steps in (4, 8):
        with MemoryCurve(nn.Identity()) as curve:
            program(steps=steps, **settings)
        found.append(curve.peak_bytes)
    return found


def test_memory_grows_on_rank_0_by_the_same_with_half_the_batch():
    growths = [[(after - before) // 4 for before, after in launch(
        lambda: peaks(VALIDATED.broken(), batch=batch), ranks=4)] for batch in (60, 30)]
    assert growths[0] == growths[1] and growths[0][1:] == [0, 0, 0]
    kept = 360 * (128 + 10 + 10 + 1) * 4  # ReLU's, log_softmax's, softmax's, the largest's place
    assert kept <= growths[0][0] <= 1.01 * kept + 360 * 4
    grown = [after - before for before, after in launch(
        lambda: peaks(VALIDATED.variant()), ranks=4)]
    assert min(grown) >= 4 * (64 * 128 + 128 * 10) * 4  # p - q of the weights, on all ranks


def test_the_loss_jumps_where_the_damaged_shard_is_read():
    found = losses(STORED.broken())[0]
    assert max(found[:5]) < 2.4 and found[5] > 5 * found[4] and found[-1] > 5
    assert losses(STORED.program)[0][-1] == pytest.approx(1.26, abs=0.1)
    slow = edited_program(STORED.program, (*STORED.edits, ("lr=0.1", "lr=0.01")))
    found = losses(slow)[0]
    assert max(found[:5]) < 2.6 and found[5] == pytest.approx(18.5, abs=0.1)
    found = losses(STORED.broken(), ranks=1, steps=24)[0]
    assert max(found[:21]) < 2.5 and found[21] > 50
    found = losses(STORED.variant())[0]
    assert max(found[:3]) < 2.4 and found[3] > 5 * found[2]  # shard 14 is rank 2's in step 3


def test_a_run_that_goes_on_sees_two_batches_twice():
    found = launch(RESUMED.broken(), ranks=4)
    times = Counter(Counter(image for rank in found for image in rank["seen"]).values())
    assert times == {3: 240, 2: 240, 1: 220}
    rows = losses(RESUMED.program)[0], found[0]["losses"]
    assert [round(row[8], 2) for row in rows] == [0.58, 0.48]
    assert all(right < wrong for right, wrong in zip(rows[0][9:], rows[1][9:]))
    found = launch(RESUMED.variant(), ranks=4)
    times = Counter(Counter(image for rank in found for image in rank["seen"]).values())
    assert times[3] > 100 and times[1] > 100


def test_a_restart_is_worse_where_one_rank_has_an_old_file():
    usual, found = losses(SPLIT.broken(), first=9)[0], losses(SPLIT.broken())[0]
    assert usual == pytest.approx(losses(SPLIT.broken(), stop=0)[0])  # all have saved: no trace
    assert found[:8] == usual[:8] and [round(row[8], 2) for row in (found, usual)] == [0.75, 0.5]
    found = losses(SPLIT.variant())[0]  # rank 0 itself has the old file, and says step 3
    assert len(found) == 6 + 9 and abs(found[6] - usual[3]) > 0.5
