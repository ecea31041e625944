"""The clinic's programs on split models show what is told of them, and one that is mended doesn't.

The checks hold the mended ones to one process.
"""

import math
import os

import pytest
import torch
import torch.nn.functional as F

from ranklab import launch
from ranklab.clinic.sharding import CASES
from ranklab.data import batch_at, held_out_batch, text_file
from ranklab.models.gpt import GPT, GPTConfig

pytestmark = [pytest.mark.timeout(120), pytest.mark.sweep]  # a story's numbers

WIDE_LAYER, STAGED_GPT, GATHERED_MODEL, MOVED_GPT, FLAT_MODEL = CASES


def trained(case, *, program=None, ranks=None, **settings):
    """What each rank returns of the program as it was found, or of another one."""
    return launch(_train, program or case.broken(), settings, ranks=ranks or 4)


def _train(program, settings):
    return program(**settings)


def apart(one, other, name):
    return (one["weights"][name] - other["weights"][name]).abs().max().item()


def test_two_ranks_of_a_pair_print_different_losses_and_part():
    start, end = trained(WIDE_LAYER, steps=0), trained(WIDE_LAYER)
    assert apart(start[0], start[1], "head.weight") == 0 < apart(end[0], end[1], "head.weight")
    assert abs(end[0]["losses"][0] - end[1]["losses"][0]) > 1e-3
    without = trained(WIDE_LAYER, p=0.0)
    assert without[0]["losses"] == without[1]["losses"]
    mended = trained(WIDE_LAYER, program=WIDE_LAYER.program)
    assert mended[0]["losses"] == mended[1]["losses"] != mended[2]["losses"]


def test_a_merged_model_is_worse_than_its_training_loss():
    def gap(stages):
        """How far the file's loss on all rows is above the mean of those logged."""
        model = GPT(GPTConfig(n_ctx=16, n_embd=32, n_layer=4))
        state = {name: weight for stage in reversed(stages) for name, weight in
                 stage["weights"].items()}
        model.load_state_dict(state | {"head.weight": state["token.weight"]})
        tokens, losses = text_file(os.__file__).train, stages[-1]["losses"]
        with torch.no_grad():
            seen = [model(*batch_at(tokens, step, 8, 16)).item() for step in range(len(losses))]
        return (sum(seen) - sum(losses)) / len(losses)

    stages = trained(STAGED_GPT)
    assert stages[-1]["losses"][0] > 5.3 and min(stages[-1]["losses"]) < 3.5
    assert gap(stages) > 0.7
    assert gap(trained(STAGED_GPT, program=STAGED_GPT.program)) < 0
    assert gap(trained(STAGED_GPT, ranks=1)) < 0


def test_a_rate_that_one_rank_takes_is_too_large_and_the_log_is_not_the_checkpoint():
    broken, mended = trained(GATHERED_MODEL), trained(GATHERED_MODEL,
                                                      program=GATHERED_MODEL.program)
    assert max(broken[0]["losses"]) > 100 > 6 > max(mended[0]["losses"])
    assert broken[0]["losses"][1] > 5.5 > 5.3 > mended[0]["losses"][1]
    for settings in ({"lr": 0.0}, {"lr": 100.0}, {"ranks": 1}):  # step 0 is not in it
        again = trained(GATHERED_MODEL, steps=2, **settings)[0]
        assert again["losses"] == pytest.approx(broken[0]["losses"][:2], rel=1e-5)
    slow = trained(GATHERED_MODEL, lr=0.25)[0]
    assert max(slow["losses"]) < 6 and slow["losses"][-1] < slow["losses"][0] - 0.5
    for is_right, got in ((False, slow), (True, mended[0])):
        model = torch.nn.Sequential(
            torch.nn.Embedding(256, 16), torch.nn.Flatten(), torch.nn.Linear(128, 64),
            torch.nn.ReLU(), torch.nn.Linear(64, 256))
        torch.nn.utils.vector_to_parameters(got["weights"], model.parameters())
        unseen, following = held_out_batch(text_file(os.__file__).held_out, 48, 8)
        loss = F.cross_entropy(model(unseen), following[:, -1]).item()
        assert math.isclose(loss, got["held_out"][-1], rel_tol=1e-4) is is_right


def test_the_loss_stays_at_that_of_a_guess():
    losses = trained(MOVED_GPT)[0]["losses"]
    assert all(abs(loss - math.log(256)) < 0.2 for loss in losses)
    assert trained(MOVED_GPT, lr=1.0)[0]["losses"] == losses
    assert trained(MOVED_GPT, program=MOVED_GPT.program)[0]["losses"][-1] < 4


def test_four_ranks_log_half_of_the_norm_of_one():
    four, [one] = trained(FLAT_MODEL), trained(FLAT_MODEL, ranks=1)
    norms = [got["norms"][0] for got in four]
    assert one["norms"][0] > 1 > 0.6 > norms[0] and len(set(norms)) == 4
    assert math.isclose(sum(norm**2 for norm in norms), one["norms"][0] ** 2, rel_tol=1e-4)
    assert math.isclose(four[0]["losses"][0], one["losses"][0], rel_tol=1e-4)
    assert abs(four[0]["losses"][1] - one["losses"][1]) > 0.05
