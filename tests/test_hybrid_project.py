"""Lab 12's project: equal to one process, resumed in other layouts, run by its command."""

import pytest

from ranklab.checkpoint.reshard import reshard_checkpoint
from ranklab.hybrid import mesh_grad_norm, parallelize, parse_layout
from ranklab.mesh import build_mesh
from ranklab.models.gpt import count_parameters
from ranklab.pipeline_parallel import tied_embedding_sync
from ranklab.projects import hybrid as project
from ranklab.projects.hybrid import __main__ as command

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("one_thread")]

FEW = {"steps": 3, "eval_batch": 16, "log_every": 1, "timeout": 170}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What was stopped in one layout and went on in another, by a learner's functions."""
    folder = tmp_path_factory.mktemp("called")

    def named(call):
        def noted(*arguments, **named):
            (folder / call.__name__).touch()
            return call(*arguments, **named)

        return noted

    how = FEW | {"checkpoint": str(folder / "saved"), "build": named(build_mesh),
                 "parallelize": named(parallelize), "sync": named(tied_embedding_sync),
                 "norm": named(mesh_grad_norm), "reshard": named(reshard_checkpoint)}
    first = project.run(layout=parse_layout("1x1x2,full,virtual=2,cp=2"), until=1, **how)
    assert first["ranks"][0]["steps"] == 1 and first["ranks"][0]["loss"] is None
    last = project.run(layout=parse_layout("1x2x2,sp"), resume=True, **how)
    assert len([*folder.iterdir()]) == 5 + 1
    return last


@pytest.mark.sweep
def test_it_ends_as_one_process(results):
    first, shape = results["ranks"][0], results["shape"]
    assert first["steps"] == 3
    assert first["loss"] == pytest.approx(first["alone"], abs=1e-4)
    assert len(first["history"].steps) == len(first["bubbles"]) == 2
    assert all(0 < bubble < 1 for bubble in first["bubbles"])
    ends = shape.vocab_size * shape.n_embd  # the tied matrix is on both stages
    norms = (2 * shape.n_layer + 1) * shape.n_embd  # these are on both tensor ranks
    assert sum(rank["parameters"] for rank in results["ranks"]) == (
        count_parameters(shape) + ends + norms)


@pytest.mark.sweep
def test_the_report_says_whose_functions_they_are_and_what_it_costs(results):
    text = project.report(results)
    assert "Yours: build_mesh, parallelize, tied_embedding_sync, mesh_grad_norm, reshard_" in text
    rows = {line[:28].strip(): line[28:].split() for line in text.splitlines()}
    for name, slack in (("held: parameters", 0), ("held: gradients", 0), ("held: total", 0.1),
                        *((f"sent in a step: {axis}", 1e-4)
                          for axis in ("data", "tensor", "pipeline"))):
        formula, counted = (float(n.replace(",", "")) for n in rows[name])
        assert counted == pytest.approx(formula, rel=slack, abs=64), name
    assert "ranks 2 3" in text and "bubble" in text and "drifts" not in text
    results["ranks"][0]["alone"] += 0.01
    assert "compare the losses of the first steps" in project.report(results)


def test_a_dry_run_is_that_of_the_layout_that_is_given(capsys):
    assert command.project.main(["--dry-run", "--layout", "2x1x2,full"]) == 0
    printed = capsys.readouterr().out
    assert "laptop on 4 GPUs: dp 2 x tp 1 x pp 2 full, 4 micro-batches" in printed
    assert "it fits in 80 GB" in printed
