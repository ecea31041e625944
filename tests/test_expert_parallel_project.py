"""Lab 11's project: equal for any spread, counts as said, a learner's parts, torchrun."""

import pytest

from ranklab import expert_parallel as ep
from ranklab.projects import expert_parallel as project

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("one_thread")]

FEW = {"steps": 3, "batch": 8, "micro_batch": 2, "eval_batch": 8, "timeout": 170}


def test_all_spreads_learn_the_same_and_send_what_is_said():
    losses = []
    for ranks, spread in ((1, 1), (4, 4), (4, 2)):
        found = project.run(ranks=ranks, ep=spread, compare=False, factor=1.25, **FEW)
        losses.append(found.losses["experts"])
        assert 0 < found.dropped < 1
        for seen in found.ranks:
            assert seen["sent"] == seen["said"] and (seen["sent"] > 0) == (spread > 1)
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-5)


def test_rows_travel_in_the_type_of_matrix_products():
    seen, wide = (project.run(ranks=2, compare=False, precision=precision, **FEW).ranks[0]
                  for precision in ("bf16", "fp32"))
    assert seen["sent"] == seen["said"] < 0.6 * wide["sent"]


def test_a_learners_own_parts_are_used_as_on_gpus(monkeypatch, tmp_path):
    called = tmp_path / "called"

    def mine(x, chosen, n_experts, group=None):
        called.touch()
        return ep.dispatch_tokens(x, chosen, n_experts, group)

    monkeypatch.setenv("RANKLAB_REHEARSE", "gpu")
    found = project.run(ranks=2, dispatch=mine, balance="bias", shared_width=16,
                        average=lambda *args: ep.expert_gradients(*args), **(FEW | {"steps": 10}))
    assert called.exists()
    text = project.report(found)
    assert "Yours: dispatch, average." in text and "held out, dense" in text
    assert len(found.loads) == 1 and "choices dropped: 0.0%" in text


def test_goes_on_with_another_number_of_ranks(tmp_path):
    how = FEW | {"compare": False, "steps": 4, "balance": "bias"}
    whole = project.run(ranks=2, **how)
    how["checkpoint"] = str(tmp_path / "saved")
    project.run(ranks=4, **how, until=2)
    again = project.run(ranks=2, resume=True, ep=1, **how)
    assert again.steps == 4
    assert again.losses["experts"] == pytest.approx(whole.losses["experts"], abs=1e-4)
