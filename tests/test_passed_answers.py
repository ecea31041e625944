"""The learner's answers, outside of their notebooks."""

import nbformat
import pytest
from conftest import ROOT
from test_begin import MINE

from ranklab import launch, passed_answers
from ranklab.course import build, labs, progress
from ranklab.course.check import PASSED

HELPED = """
def gpipe_schedule(stages, micro_batches):
    check_counts(stages=stages, micro_batches=micro_batches)
    return tuple(all_of("F", s, micro_batches) + all_of("B", s, micro_batches)
                 for s in range(stages))
"""
HELPER = """
def all_of(kind, stage, micro_batches):
    return tuple(Action(kind, stage, m) for m in range(micro_batches))
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder of a learner's own, with copies of the labs in work/."""
    monkeypatch.setenv("RANKLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(labs, "repository", lambda *_: tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    for stem in ("00_ranks", "09_pipeline_parallel"):
        notebook = build.lab_notebook(ROOT, stem)
        if stem.startswith("09"):
            number = next(n for n, cell in enumerate(notebook.cells)
                          if "def gpipe_schedule" in cell.source)
            notebook.cells.insert(number, nbformat.v4.new_code_cell(HELPER))
        nbformat.write(notebook, tmp_path / "work" / f"{stem}.ipynb")
    return tmp_path


def test_answers_that_passed_are_defined_and_judged_again(home):
    progress.record("shard_range", PASSED, MINE)
    progress.record("gpipe_schedule", PASSED, HELPED)
    progress.record("one_f_one_b_schedule", PASSED,
                    HELPED.replace("gpipe_schedule", "one_f_one_b_schedule"))
    progress.record("bubble_fraction", PASSED)
    shown = []
    answers = passed_answers(["gpipe_schedule", "shard_range", "ring_shift", "bubble_fraction",
                           "one_f_one_b_schedule"], shown.append)
    assert {line.split()[0]: line.split("  ")[-1].split(":")[-1].strip() for line in shown} == {
        "shard_range": "yours, checked again", "ring_shift": "yours has not passed",
        "gpipe_schedule": "yours, checked again",
        "bubble_fraction": "the record of your answer has no cell that defines it",
        "one_f_one_b_schedule": "yours no longer passes (failed)"}
    assert sorted(answers) == ["gpipe_schedule", "shard_range"]
    assert [*answers["shard_range"](5, 0, 2)] == [0, 1, 2]
    assert launch(lambda: len(answers["gpipe_schedule"](2, 3)[0]), ranks=2) == [6, 6]
    code = answers["shard_range"].__code__
    assert code.co_filename == "<your cell of shard_range>"     # which a traceback shows
