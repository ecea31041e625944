"""Lab 06's project: each stage trains alike, holds and sends what the formulas say, and resumes."""

import json

import pytest

from ranklab.models.gpt import GPTConfig
from ranklab.projects import zero as project
from ranklab.projects.zero.__main__ import project as command
from ranklab.projects.zero.config import MODELS
from ranklab.zero import ZeroStage2, deepspeed_config, zero_memory
from ranklab.zero.config import read_config
from ranklab.zero.training import STAGES

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

SMALL = {"batch": 12, "micro_batch": 3, "eval_batch": 12, "log_every": 1}


@pytest.fixture
def small_model(monkeypatch):
    """The laptop's model is a tiny one; not in another process."""
    monkeypatch.setitem(MODELS, "laptop", GPTConfig(n_layer=2, n_ctx=16, n_embd=32))


@pytest.mark.usefixtures("small_model")
def test_every_stage_trains_alike_and_holds_and_sends_what_the_formulas_say(text):
    """Each of four ranks has other parameters in its shards: some no norm at all."""
    results = project.run(ranks=4, path=text, steps=3, **{**SMALL, "micro_batch": 2})
    losses = [row.held_out for row in results["rows"]]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-4)
    assert [row.steps for row in results["rows"]] == [3] * 4
    for row in results["rows"]:
        # padding makes R divide; Adam counts its steps, 4 bytes for each tensor; clipping adds
        # squares up: one number from each rank
        counted, predicted = row.costs._replace(peak=0), row.predicted._replace(peak=0)
        assert counted == pytest.approx(predicted, abs=500)
        assert all(number >= least for number, least in zip(counted, predicted, strict=True))
    peaks = [row.costs.peak for row in results["rows"]]
    assert peaks == sorted(peaks, reverse=True)
    text = project.report(results)
    assert all(f"{row.costs.sent:,}" in text for row in results["rows"])


@pytest.mark.usefixtures("small_model")
def test_what_is_offloaded_is_not_on_the_device(text, tmp_path):
    how = {"ranks": 2, "path": text, "steps": 3, "precision": "bf16", **SMALL}
    here, = project.run(numbers=(2,), **how)["rows"]
    results = project.run(numbers=(1, 2, 3), offload=str(tmp_path), **how)
    for row in results["rows"]:
        assert row.costs._replace(peak=0) == pytest.approx(row.predicted._replace(peak=0), abs=500)
        assert row.costs.optimizer_state == 0 < row.costs.offloaded
        assert row.held_out == pytest.approx(here.held_out, rel=1e-4)
    assert results["rows"][1].costs.peak < here.costs.peak
    assert f"Offloaded to {tmp_path}" in project.report(results)


@pytest.mark.usefixtures("small_model")
def test_a_learners_class_and_formula_are_used(text, tmp_path):
    called = str(tmp_path / "called")

    def half(*arguments):
        return zero_memory(*arguments)._replace(gradients=7)

    class Mine(ZeroStage2):
        def step_ends(self):
            open(called, "w").close()
            super().step_ends()

    results = project.run(numbers=(2,), stages={**STAGES, 2: Mine}, zero_memory=half, ranks=2,
                          path=text, steps=1, **SMALL)
    assert (tmp_path / "called").exists() and results["rows"][0].predicted.gradients == 7
    assert "Yours: ZeroStage2, zero_memory." in project.report(results)


def test_a_deepspeed_config_becomes_the_projects(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(deepspeed_config(10**9, 4, 3e9, 64, 4, lr=1e-4)))
    options, config = command.parse(["--config", str(path), "--lr", "0.5"])
    assert options.stages() == (2,) and config.offload == "cpu"
    assert (config.batch, config.micro_batch, config.precision) == (64, 4, "bf16")
    assert (config.lr, config.betas, config.clip) == (0.5, (0.9, 0.95), 1.0)
    for broken, sentence in (({"fp16": {"enabled": True}}, "take bf16"),
                             ({"zero_optimization": {"offload_param": {"device": "cpu"}}},
                              "offload_param is not for"),
                             ({"optimizer": {"type": "Lion"}}, "must be 'AdamW'")):
        path.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=sentence):
            read_config(path)


@pytest.mark.parametrize("gpus, gb, stage", [(4, 80, 0), (4, 24, 1), (4, 11, 2), (32, 6, 3)])
def test_the_stage_for_a_machine_is_the_fastest_that_fits(gpus, gb, stage, tmp_path, capsys):
    path = tmp_path / "ds.json"
    command.main(["--size", "1.3b", "--gpus", str(gpus), "--gpu-gb", str(gb),
                  "--write-config", str(path)])
    assert f"{gpus} GPUs of {gb} GB: stage {stage}" in capsys.readouterr().out
    assert json.loads(path.read_text())["zero_optimization"]["stage"] == stage
