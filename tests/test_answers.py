"""The library's answers pass, as do right ones of other kinds; stubs and predictions are judged.

tests/right_answers/<idea>.py holds right answers that differ from the library's: functions called
<exercise>__<kind>, and a dict RIGHT of edited ones. (What is wrong: test_mistakes.py.)
"""

import collections
import importlib.util
import inspect
import math
import re
from pathlib import Path

import jupytext
import pytest
from kernels import KERNELS, on_kernels

from ranklab import engine
from ranklab.checks import trial
from ranklab.checks.prover.slips import edited
from ranklab.clinic.all_cases import CASES
from ranklab.course import labs
from ranklab.course.check import FAILED, NOT_WRITTEN, PASSED, judge, judge_prediction

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "labs" / "source"
# Given as code that is wrong: it is run, and seen failing.
BROKEN = [case.name for case in CASES]
TO_MEND = {"ring_shift", *BROKEN}
LABS = [stem for stem in labs.written() if (SOURCES / f"{stem}.py").exists()]
# In every run: of these labs one right answer of another kind, and one exercise's own answer on
# GPUs. All others are left to `make sweep`.
SOME = LABS[::3]

pytestmark = pytest.mark.timeout(120)


def load(path, name):
    """The module, not in sys.modules: its functions travel by value, as a notebook's do."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def right_answers():
    """{id: (exercise's name, the function or class)} of every lab."""
    found = {}
    for path in sorted(Path(__file__).with_name("right_answers").rglob("*.py")):
        module = load(path, f"right_answers_{path.stem}")
        own = {name: item for name, item in vars(module).items() if "__" in name.strip("_")
               and getattr(item, "__module__", "") == module.__name__}
        own |= {f"{right.__name__}__{kind}": right
                for kind, right in getattr(module, "RIGHT", {}).items()}
        twice = found.keys() & own.keys()
        assert not twice, f"{path}: {twice} is there twice"
        found |= {name: (name.partition("__")[0], item) for name, item in own.items()}
    return found


def right_params():
    """All right answers, by id; in every run the first of those in SOME."""
    seen = set()
    for test_id, (name, answer) in RIGHT.items():
        stem = STEM_OF.get(name)  # None: the lab's cells are not written yet
        yield pytest.param(name, answer, id=test_id, marks=swept(stem not in SOME or stem in seen))
        seen.add(stem)


def swept(is_left):
    return [pytest.mark.sweep] if is_left else []


RIGHT = right_answers()
EXERCISES = [(stem, item) for stem in LABS for item in labs.checks_of(stem).EXERCISES]
STEM_OF = {item.name: stem for stem, item in EXERCISES}
LAST_OF = {stem: item.name for stem, item in EXERCISES}
PREDICTIONS = [item for stem in LABS for item in labs.checks_of(stem).PREDICTIONS]


@pytest.mark.parametrize("name, right", list(right_params()))
def test_a_right_answer_of_another_kind_passes(name, right):
    verdict = judge(labs.find_exercise(name), right)
    assert verdict.state == PASSED, verdict


@pytest.mark.parametrize("exercise", [
    pytest.param(item, id=item.name, marks=swept(stem not in SOME or item.name != LAST_OF[stem]))
    for stem, item in EXERCISES])
def test_the_text_of_the_library_passes_as_on_gpus(exercise, monkeypatch):
    monkeypatch.setenv("RANKLAB_REHEARSE", "gpu")  # the solved labs judge it under the CPU's rules
    verdict = judge(exercise, edited(exercise.answer))
    assert verdict.state == PASSED, verdict
    assert verdict.holds and not verdict.mistake
    for sentence in verdict.holds:
        assert sentence and "\n" not in sentence and not sentence.endswith("."), sentence


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stem", LABS)
def test_the_answers_of_the_library_pass_with_all_kernels(stem):
    for kernels in KERNELS:
        done = on_kernels(kernels, stem)
        assert done.returncode == 0, f"{kernels} kernels: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("stem, exercise", [
    pytest.param(stem, item, id=item.name, marks=swept(item.name in BROKEN[1:]))
    for stem, item in EXERCISES])
def test_the_stub_is_not_written_yet_and_starts_nothing(stem, exercise, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a stub must not cost a launch")

    text = stub_text(stem, exercise.name)
    if exercise.name in TO_MEND:
        assert judge(exercise, stub_of(exercise, text)).state == FAILED
        return
    for module in (engine, trial):
        monkeypatch.setattr(module, "launch", refuse)
    verdict = judge(exercise, stub_of(exercise, text))
    assert verdict.state == NOT_WRITTEN and not verdict.holds
    assert "  --    not written yet\n" in str(verdict)


def stub_text(stem, name):
    """The lab's own cell with the stub."""
    cells = jupytext.read(SOURCES / f"{stem}.py", fmt="py:percent").cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    stub, = [cell for cell in code if re.search(rf"^(def|class) {name}\b", cell, re.M)]
    return stub


def stub_of(exercise, text):
    """The stub, defined but not called; its base classes and defaults are the library's."""
    namespace = dict(vars(inspect.getmodule(exercise.answer)), __name__="__main__")
    exec(compile(text, f"<the stub of {exercise.name}>", "exec"), namespace)
    return namespace[exercise.name]


@pytest.mark.parametrize("prediction", PREDICTIONS, ids=lambda prediction: prediction.name)
def test_the_working_is_right_and_every_slip_is_named(prediction):
    value = eval(prediction.solution, {"math": math})
    state, line = judge_prediction(prediction, value)
    assert state == PASSED and line.startswith("ok    "), line
    assert not prediction.why or prediction.why in line
    for slip, confusion in (prediction.mistakes or {}).items():
        wrong = eval(slip, {"math": math}) if isinstance(slip, str) else slip  # of a Formula
        state, line = judge_prediction(prediction, wrong)
        assert (state, line.endswith(confusion)) == (FAILED, True), line
    assert judge_prediction(prediction, ...)[0] == NOT_WRITTEN


def test_names_are_unique_over_all_labs():
    names = [item.name for _, item in EXERCISES] + [item.name for item in PREDICTIONS]
    assert [name for name, times in collections.Counter(names).items() if times > 1] == []


def test_every_lab_has_checks():
    assert {path.stem for path in SOURCES.glob("*.py")} <= {*labs.written(), labs.TOUR}
