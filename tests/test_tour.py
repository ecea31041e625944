"""The tour: a terminal's in a minute, the notebook with its outputs; nothing takes it for a lab."""

import json
import re
import shutil

import nbformat
import pytest
from conftest import ROOT

from ranklab import cli
from ranklab.course import build as builder
from ranklab.course import labs, work
from ranklab.course.grade import grade
from ranklab.projects import tour

TOUR = ROOT / "labs" / "tour.ipynb"
SOURCE = """# %% [markdown]
# # The tour

# %%
import os

import torch
import torch.distributed as dist

from ranklab import device


def add_up():
    ...
"""


@pytest.mark.timeout(180)
def test_the_terminals_tour_has_four_ranks_a_named_hang_and_one_loss(capsys):
    assert cli.main(["tour"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 40
    assert re.findall(r"^\[rank (\d)\] process \d+ brings \1; the sum is 6$", text, re.M) == \
        ["0", "1", "2", "3"]
    steps = re.findall(r"^ +\d +(\d\.\d{4}) +(\d\.\d{4})$", text, re.M)
    assert len(steps) == tour.STEPS
    assert [float(one) for one, _ in steps] == pytest.approx([float(four) for _, four in steps],
                                                             abs=1.1e-4)
    assert "ranks 0, 1, 3 of 4 did not finish" in text and "rank 2  finished" in text
    assert len(re.findall(r"rank [013]  waits in all_reduce ", text)) == 3
    rows = re.findall(r"^(\d x \d x \d) +(\d\.\d{4}) +([\d,]+) KB +([\d,]+) KB$", text, re.M)
    assert len(rows) == len({sent for *_, sent in rows}) == 5, "other bytes"
    losses = [float(loss) for _, loss, *_ in rows]
    assert losses == pytest.approx([losses[0]] * 5, abs=1.1e-4)


def test_the_notebook_has_the_same_functions_and_shows_its_outputs():
    assert not builder.stale(ROOT, [labs.TOUR]), "run `ranklab build tour`"
    assert not (ROOT / "solutions" / TOUR.name).exists()
    text = "\n".join(output.get("text", "") for cell in nbformat.read(TOUR, as_version=4).cells
                     for output in cell.get("outputs", ()))
    assert "rank 2  finished" in text and text.count("within 0.0001: True") == 2


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_a_gpus_rules_refuse_no_cell(capsys):
    assert cli.main(["rehearse", str(TOUR)]) == 0
    assert "0 of 7 cells with code raised" in capsys.readouterr().out


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A checkout with a small tour, built; the learner stands in it."""
    (tmp_path / "labs" / "source").mkdir(parents=True)
    (tmp_path / "labs" / "source" / "tour.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)

    def execute(notebook, _):
        notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="an output\n")]

    monkeypatch.setattr(builder, "execute", execute)
    assert cli.main(["build", "tour"]) == 0
    return tmp_path


def outputs(path):
    return [cell.get("outputs") for cell in json.loads(path.read_text())["cells"]][1]


def test_the_builder_writes_one_notebook_and_keeps_its_outputs(root, monkeypatch):
    path = root / "labs" / "tour.ipynb"
    assert outputs(path) and not (root / "solutions" / "tour.ipynb").exists()
    assert "dist.all_reduce(number)" in path.read_text() and builder.stale(root) == []
    monkeypatch.setattr(builder, "_function_of_tour", lambda _: "def add_up():\n    return 6")
    assert builder.stale(root) == ["labs/tour.ipynb"], "the library's function was edited"


def test_the_copy_has_the_outputs_and_a_newer_tour_is_merged(root, capsys):
    assert work.bring(root, root / "work")[0].startswith("Copied to work/: tour. ")
    copy = root / "work" / "tour.ipynb"
    assert outputs(copy) == outputs(root / "labs" / "tour.ipynb")
    notebook = json.loads(copy.read_text())
    notebook["cells"][1]["source"] = "print('changed')"
    copy.write_text(json.dumps(notebook))
    (root / "labs" / "source" / "tour.py").write_text(SOURCE.replace("The tour", "A newer tour"))
    assert cli.main(["build"]) == 0
    assert "tour has a newer version" in work.bring(root, root / "work")[0]
    assert cli.main(["work", "--merge", "tour"]) == 0
    assert "A newer tour" in copy.read_text() and "print('changed')" in copy.read_text()


def test_it_is_no_lab(tmp_path, capsys):
    assert labs.TOUR not in labs.STEMS and labs.names_of(labs.TOUR) == []
    with pytest.raises(ValueError, match="no lab is called 'tour'"):
        labs.find_stem(labs.TOUR)
    shutil.copy(TOUR, tmp_path)
    assert grade(tmp_path, None, 1) == 2
    assert "there is no notebook in" in capsys.readouterr().out
