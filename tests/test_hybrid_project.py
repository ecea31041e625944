"""Lab 12's project: equal to one process, stopped and resumed in other layouts, logged, refused."""

import importlib.util
import subprocess
import sys

import pytest

from ranklab.checkpoint.reshard import reshard_checkpoint
from ranklab.engine import RankError, torchrun
from ranklab.hybrid import Layout, mesh_grad_norm, parallelize
from ranklab.mesh import build_mesh
from ranklab.models.gpt import count_parameters
from ranklab.pipeline_parallel import tied_embedding_sync
from ranklab.projects import hybrid as project
from ranklab.projects.hybrid import __main__ as command
from ranklab.projects.hybrid import config
from ranklab.projects.hybrid.report import drift

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("one_thread")]

FEW = {"steps": 6, "micro_batch": 4, "eval_batch": 16, "log_every": 2, "timeout": 170}


def test_stopped_and_resumed_in_other_layouts_it_ends_as_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("RANKLAB_REHEARSE", "gpu")
    how = FEW | {"checkpoint": str(tmp_path / "saved")}
    zero = project.run(layout=Layout(2, 2, 2, zero=1), until=2, **how)
    assert zero["ranks"][0]["steps"] == 2 and zero["ranks"][0]["loss"] is None
    project.run(layout=Layout(1, 2, 4), until=4, resume=True, **how)
    found = project.run(layout=Layout(), resume=True, **how)
    first = found["ranks"][0]
    assert first["steps"] == 6
    assert first["loss"] == pytest.approx(first["alone"], abs=1e-4)


def test_a_learners_own_functions_do_it_and_the_report_says_what_it_costs(tmp_path):
    def named(call):
        def mine(*given, **named):
            (tmp_path / call.__name__).touch()
            return call(*given, **named)

        return mine

    own = {"build": named(build_mesh), "parallelize": named(parallelize),
           "sync": named(tied_embedding_sync), "norm": named(mesh_grad_norm),
           "reshard": named(reshard_checkpoint)}
    how = own | FEW | {"layout": Layout(2, 2, 2, zero=1, sequence_parallel=True), "log_every": 1,
                       "micro_batch": 2,  # or no gradient is there when most is held
                       "checkpoint": str(tmp_path / "saved")}
    project.run(until=1, **how)
    found = project.run(resume=True, **how)
    assert len([*tmp_path.iterdir()]) == 5 + 1
    assert "Yours: build_mesh, parallelize, tied_embedding_sync, mesh_grad_norm, reshard_" \
        in project.report(found)
    first, shape = found["ranks"][0], found["shape"]
    history = first["history"]
    assert first["loss"] == pytest.approx(first["alone"], abs=1e-4)
    assert len(history.steps) == len(history.bubble) == len(history.mfu) == 5
    assert all(0 < bubble < 1 for bubble in history.bubble)
    ends = shape.vocab_size * shape.n_embd  # the tied matrix is on both stages
    twice = 2 * 2 * (2 * shape.n_layer + 1) * shape.n_embd  # norms are on each tensor rank
    assert sum(rank["parameters"] for rank in found["ranks"]) == (
        2 * (count_parameters(shape) + ends) + twice // 2)
    rows = {line[:28].strip(): line[28:].split() for line in project.report(found).splitlines()}
    for name, slack in (("held: parameters", 0), ("held: gradients", 0), ("held: total", 0.05),
                        *((f"sent in a step: {axis}", 1e-4)
                          for axis in ("data", "tensor", "pipeline"))):
        formula, counted = (float(n.replace(",", "")) for n in rows[name])
        assert counted == pytest.approx(formula, rel=slack, abs=64), name
    assert "ranks 4 5 6 7" in project.report(found)


def test_losses_that_have_drifted_apart_are_explained():
    assert drift(2.7133, None) == drift(2.7133, 2.7134) == []
    said = drift(2.7133, 2.7336)
    assert "compare the first steps' losses" in said[-1] and max(map(len, said)) <= 100


@pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="needs tensorboard")
def test_tensorboard_has_all_that_is_logged(tmp_path):
    found = project.run(layout=Layout(1, 1, 2), compare=False, tensorboard=str(tmp_path), **FEW)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events, history = EventAccumulator(str(tmp_path)), found["ranks"][0]["history"]
    events.Reload()
    for name, values in (("loss", history.loss), ("bubble", history.bubble),
                         ("sent/pipeline", [history.sent["pipeline"]] * 3),
                         ("held out", [history.held_out[6]])):
        assert [each.value for each in events.Scalars(name)] == pytest.approx(values)
    assert {"speed", "mfu", "peak", "memory/activations"} <= {*events.Tags()["scalars"]}


def test_torchrun_runs_it_in_place():
    said = torchrun("-m", "ranklab.projects.hybrid", "--steps", "3", "--pp", "2", "--eval-batch",
                    "16", "--no-compare", ranks=2)
    assert said.count("held out: ") == 1, said


def test_a_dry_run_is_that_of_the_layout_that_is_given():
    asked = [sys.executable, "-m", "ranklab.projects.hybrid", "--dry-run", "--layout", "2x1x2,full"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=100)
    assert "laptop on 4 GPUs: dp 2 x tp 1 x pp 2 full, 4 micro-batches" in said.stdout, said
    assert "It fits in the 78 GB" in said.stdout


# --- what is refused ------------------------------------------------------------------------------

def test_sizes_of_axes_change_those_of_the_layout():
    assert command.project.parse([])[0].chosen_layout() == Layout(2, 2, 2)
    assert command.project.parse(["--dp", "4"])[0].chosen_layout() == Layout(4)
    given = command.project.parse(["--layout", "2x2x2,zero", "--dp", "4"])[0].chosen_layout()
    assert given == Layout(4, 2, 2, zero=1)
    assert command.project.parse(["--size", "130b"])[0].chosen_layout().ranks == 128


def test_a_mesh_that_is_wrong_is_a_sentence_on_every_rank():
    def build(axes, joined=()):
        return build_mesh({**axes, "data": 3}, joined)

    with pytest.raises(RankError, match="2 x 3 x 1 = 6 ranks, but the job has 4"):
        project.run(layout=Layout(2, 1, 2), build=build, **FEW)


def test_without_tensorboard_the_sentence_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as end:
        command.main(["--tensorboard", "curves"])
    assert end.value.code == 2
    assert "pip install -c constraints.txt tensorboard" in capsys.readouterr().err
