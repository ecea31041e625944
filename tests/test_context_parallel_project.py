"""Lab 10's project: equal by all methods, counts as said, a learner's parts, torchrun."""

import pytest

from ranklab.context_parallel import context_attention, zigzag_shard
from ranklab.projects import context_parallel as project

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("one_thread")]

FEW = {"steps": 2, "batch": 8, "micro_batch": 4, "eval_batch": 8, "timeout": 170}


def test_all_methods_learn_the_same_and_send_what_is_said():
    losses = []
    for method, ranks in (("ring", 8), ("ulysses", 4), ("both", 4)):
        found = project.run(ranks=ranks, method=method, compare=False, **FEW)
        losses.append(found.losses["long"])
        for seen in found.ranks:
            assert seen["sent"] == seen["said"] > 0, method
        assert len(found.by_position["long"]) == 8
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-5)


@pytest.mark.sweep
def test_a_learners_own_parts_are_used_as_on_gpus(monkeypatch, tmp_path):
    called = tmp_path / "called"

    def mine(q, k, v, visible, group=None):
        called.touch()
        return context_attention(q, k, v, visible, group)

    monkeypatch.setenv("RANKLAB_REHEARSE", "gpu")
    found = project.run(ranks=8, attention=mine, documents=True,
                        shard=lambda tokens, ranks: zigzag_shard(tokens, ranks), **FEW)
    assert called.exists()
    text = project.report(found)
    assert "Yours: attention, shard." in text
    assert "quarter more, the long sequence fits" in text
    assert text.splitlines()[-1].startswith("trained on long sequences, it is better by ")


def test_goes_on_with_another_number_of_ranks(tmp_path):
    how = FEW | {"compare": False, "steps": 4}
    whole = project.run(ranks=2, **how)
    how["checkpoint"] = str(tmp_path / "saved")
    project.run(ranks=4, **(how | {"steps": 4}), until=2)
    again = project.run(ranks=2, resume=True, method="ulysses", **how)
    assert again.steps == 4
    assert again.losses["long"] == pytest.approx(whole.losses["long"], abs=1e-4)
