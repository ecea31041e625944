"""Lab 12's project and `ranklab layout`: equal to one process, resumed in other layouts, logged."""

import importlib.util
import subprocess
import sys

import pytest

from ranklab import cli
from ranklab.checkpoint.reshard import reshard_checkpoint
from ranklab.engine import torchrun
from ranklab.hybrid import Layout, mesh_grad_norm, parallelize, parse_layout
from ranklab.mesh import build_mesh
from ranklab.models.gpt import count_parameters
from ranklab.pipeline_parallel import tied_embedding_sync
from ranklab.projects import hybrid as project
from ranklab.projects.hybrid import __main__ as command
from ranklab.projects.hybrid import config
from ranklab.projects.hybrid.report import drift

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("one_thread")]

FEW = {"steps": 6, "micro_batch": 2, "eval_batch": 16, "log_every": 2, "timeout": 170}


def test_stopped_and_resumed_in_other_layouts_it_ends_as_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("RANKLAB_REHEARSE", "gpu")
    how = FEW | {"steps": 3, "log_every": 1, "checkpoint": str(tmp_path / "saved")}
    zero = project.run(layout=Layout(2, 2, 2, zero=1), until=1, **how)
    assert zero["ranks"][0]["steps"] == 1 and zero["ranks"][0]["loss"] is None
    project.run(layout=parse_layout("4x1x2,full,virtual=2"), until=2, resume=True, **how)
    found = project.run(layout=Layout(), resume=True, **how)
    first = found["ranks"][0]
    assert first["steps"] == 3
    assert first["loss"] == pytest.approx(first["alone"], abs=1e-4)


def test_a_learners_functions_do_it_and_the_report_says_what_it_costs(tmp_path):
    def named(call):
        def mine(*given, **named):
            (tmp_path / call.__name__).touch()
            return call(*given, **named)

        return mine

    how = FEW | {"layout": parse_layout("2x2x2,zero,sp"), "checkpoint": str(tmp_path / "saved"),
                 "build": named(build_mesh), "parallelize": named(parallelize), "log_every": 1,
                 "sync": named(tied_embedding_sync), "norm": named(mesh_grad_norm),
                 "reshard": named(reshard_checkpoint)}
    project.run(until=1, **how)
    found = project.run(resume=True, **how)
    said, (first, *_), shape = project.report(found), found["ranks"], found["shape"]
    assert len([*tmp_path.iterdir()]) == 5 + 1
    assert "Yours: build_mesh, parallelize, tied_embedding_sync, mesh_grad_norm, reshard_" in said
    history = first["history"]
    assert first["loss"] == pytest.approx(first["alone"], abs=1e-4)
    assert len(history.steps) == len(history.bubble) == len(history.mfu) == 5
    assert all(0 < bubble < 1 for bubble in history.bubble)
    ends = shape.vocab_size * shape.n_embd  # the tied matrix is on both stages
    twice = 2 * 2 * (2 * shape.n_layer + 1) * shape.n_embd  # norms are on each tensor rank
    assert sum(rank["parameters"] for rank in found["ranks"]) == (
        2 * (count_parameters(shape) + ends) + twice // 2)
    rows = {line[:28].strip(): line[28:].split() for line in said.splitlines()}
    for name, slack in (("held: parameters", 0), ("held: gradients", 0), ("held: total", 0.05),
                        *((f"sent in a step: {axis}", 1e-4)
                          for axis in ("data", "tensor", "pipeline"))):
        formula, counted = (float(n.replace(",", "")) for n in rows[name])
        assert counted == pytest.approx(formula, rel=slack, abs=64), name
    assert "ranks 4 5 6 7" in said


def test_losses_that_have_drifted_apart_are_explained():
    assert drift(2.7133, None) == drift(2.7133, 2.7134) == []
    assert "compare the first steps' losses" in drift(2.7133, 2.7336)[-1]


@pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="needs tensorboard")
def test_tensorboard_has_all_that_is_logged(tmp_path):
    found = project.run(layout=Layout(1, 1, 2), compare=False, tensorboard=str(tmp_path), **FEW)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events, first = EventAccumulator(str(tmp_path)), found["ranks"][0]
    history = first["history"]
    events.Reload()
    for name, values in (("loss", history.loss), ("bubble", history.bubble),
                         ("sent/pipeline", [first["sent"]["pipeline"]]),
                         ("held out", [history.held_out[6]])):
        assert [each.value for each in events.Scalars(name)] == pytest.approx(values)
    assert {"speed", "mfu", "memory/activations"} <= {*events.Tags()["scalars"]}


# --- its command, and `ranklab layout` ------------------------------------------------------------

def test_torchrun_runs_it_in_place():
    said = torchrun("-m", "ranklab.projects.hybrid", "--steps", "3", "--pp", "2", "--eval-batch",
                    "16", "--no-compare", ranks=2)
    assert said.count("held out: ") == 1, said


def test_a_dry_run_is_that_of_the_layout_that_is_given():
    asked = [sys.executable, "-m", "ranklab.projects.hybrid", "--dry-run", "--layout", "2x1x2,full"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=100)
    assert "laptop on 4 GPUs: dp 2 x tp 1 x pp 2 full, 4 micro-batches" in said.stdout, said
    assert "It fits in the 78 GB" in said.stdout


def test_sizes_of_axes_change_those_of_the_layout():
    for given, layout in ("", Layout(2, 2, 2)), ("--dp 4", Layout(4)), (
            "--layout 2x2x2,zero --dp 4", Layout(4, 2, 2, zero=1)):
        assert command.project.parse(given.split())[0].chosen_layout() == layout
    assert command.project.parse(["--size", "130b"])[0].chosen_layout().ranks == 128


def test_without_tensorboard_the_sentence_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        command.main(["--tensorboard", "curves"])
    assert "pip install -c constraints.txt tensorboard" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, words", [
    ("2x8x4,zero,sp,virtual=5 --size 100b", (
        "64 ranks: pipeline 4 x data 2 x tensor 8", "tensor    0 1 2 3 4 5 6 7", "optimizer state",
        "between nodes of 8 go the messages of: pipeline, data", "sent in a step along")),
    ("1x4x2 --per-node 4 --megatron --torchtitan", (
        "--pipeline-model-parallel-size 2 ", "torchrun --nnodes 2", "pipeline_parallel_degree = 2",
    )),
    ("1x8x1 --per-node 72 --per-host 4 --megatron", (
        "go the messages of: no axis", "--nnodes 2 --nproc-per-node 4")),
])
def test_layout_says_who_talks_to_whom_what_it_costs_and_what_others_are_told(
        arguments, words, capsys):
    assert cli.main(["layout", *arguments.split()]) == 0
    said = capsys.readouterr().out
    assert all(each in said for each in words), said
    assert ("--" in said) == ("--megatron" in arguments)


@pytest.mark.parametrize("arguments, said", [
    ("2x2", "'2x2' is no layout: write dp x tp x pp as 2x2x2"),
    ("1x3x1", "tp=3 must divide the 40 heads"),
    ("1x5x1,sp --per-node 5", "tp=5 must divide the 2048 tokens of a sequence"),
    ("1x8x1 --per-node 4", "tp=8 tensor ranks would be on several nodes of 4"),
    ("7x1x1", "dp x micro-batch = 7 must divide the batch of "),
    ("1x1x40", "stages=40 must be between 1 and the 34 layers"),
])
def test_what_can_not_be_is_a_sentence(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["layout", *arguments.split()])
    found = capsys.readouterr().err
    assert found.startswith(f"ranklab layout: {said}") and found.count("\n") == 1
