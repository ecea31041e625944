"""A check that was never seen failing proves nothing: here each one is, and by name.

tests/wrong_answers/<idea>/<exercise>.py holds a list WRONG of mutants (see mutants.py), for
mistakes that are one edit of the answer, and plain functions called <exercise>__<mistake>, for
those that are another idea. The first line of the docstring is a regular expression that must be
found in the verdict that a learner reads. tests/right_answers/<idea>.py holds right answers that
differ from the library's: all must pass.
"""

import collections
import importlib.util
import inspect
import re
import textwrap
from pathlib import Path

import jupytext
import pytest
from kernels import KERNELS, on_kernels
from mutants import as_in_a_notebook, mutant

from ranklab import engine
from ranklab.checks import trial
from ranklab.checks.prover import Proof
from ranklab.clinic.all_cases import CASES
from ranklab.course import labs
from ranklab.course.check import FAILED, NOT_WRITTEN, PASSED, judge, judge_prediction

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "labs" / "source"
# Given as code that is wrong: it is run, and seen failing.
BROKEN = [case.name for case in CASES]
TO_MEND = {"ring_shift", *BROKEN}
LABS = [stem for stem in labs.written() if (SOURCES / f"{stem}.py").exists()]
# In every run: one wrong answer of an exercise; and of these labs one right answer of another kind,
# and one exercise's own answer on GPUs. All others are left to `make sweep`.
SOME = LABS[::3]

pytestmark = pytest.mark.timeout(120)


def load(path, name):
    """The module, not in sys.modules: its functions travel by value, as a notebook's do."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answers(folder):
    """{id: (exercise's name, the function or class)} of every lab in tests/<folder>."""
    found = {}
    for path in sorted(Path(__file__).with_name(folder).rglob("*.py")):
        module = load(path, f"{folder}_{path.stem}")
        own = {name: item for name, item in vars(module).items() if "__" in name.strip("_")
               and getattr(item, "__module__", "") == module.__name__}
        own |= {wrong.test_id: wrong for wrong in getattr(module, "WRONG", ())}
        twice = found.keys() & own.keys()
        assert not twice, f"{path}: {twice} is there twice; give one a name, called=..."
        found |= {name: (name.partition("__")[0], item) for name, item in own.items()}
    return found


def wrong_params():
    """All wrong answers, by id; one of each exercise, here the first, there the second, is in every
    run.
    """
    of = collections.defaultdict(list)
    for test_id, (name, _) in WRONG.items():
        of[name].append(test_id)
    chosen = {its[i % len(its)] for i, its in enumerate(of.values())}
    for test_id, (name, answer) in WRONG.items():
        yield pytest.param(name, answer, id=test_id, marks=swept(test_id not in chosen))


def right_params():
    """All right answers, by id; in every run the first of those in SOME."""
    seen = set()
    for test_id, (name, answer) in RIGHT.items():
        stem = STEM_OF.get(name)  # None: the lab's cells are not written yet
        yield pytest.param(name, answer, id=test_id, marks=swept(stem not in SOME or stem in seen))
        seen.add(stem)


def swept(is_left):
    return [pytest.mark.sweep] if is_left else []


WRONG, RIGHT = answers("wrong_answers"), answers("right_answers")
EXERCISES = [(stem, item) for stem in LABS for item in labs.checks_of(stem).EXERCISES]
STEM_OF = {item.name: stem for stem, item in EXERCISES}
LAST_OF = {stem: item.name for stem, item in EXERCISES}
PREDICTIONS = [item for stem in LABS for item in labs.checks_of(stem).PREDICTIONS]


@pytest.mark.parametrize("name, wrong", list(wrong_params()))
def test_a_wrong_answer_is_refused_and_its_mistake_named(name, wrong):
    exercise = labs.find_exercise(name)
    assert exercise, f"no exercise is called {name}"
    pattern = (wrong.__doc__ or "").strip().partition("\n")[0].strip()
    assert pattern, "the docstring's first line says what the verdict must hold"
    verdict = judge(exercise, wrong)
    assert verdict.state == FAILED, verdict
    printed = str(verdict)
    on_one_line = " ".join(printed.split())  # a pattern need not know where lines are broken
    assert any(re.search(pattern, text, re.I) for text in (printed, on_one_line)), printed
    assert "  FAIL  " in printed and f'hint("{name}")' in printed


@pytest.mark.parametrize("name, right", list(right_params()))
def test_a_right_answer_of_another_kind_passes(name, right):
    verdict = judge(labs.find_exercise(name), right)
    assert verdict.state == PASSED, verdict


@pytest.mark.parametrize("stem, exercise", EXERCISES, ids=[item.name for _, item in EXERCISES])
def test_three_wrong_answers_for_each_exercise(stem, exercise):
    if isinstance(exercise, Proof):
        return  # test_mistakes.py looks
    found = [wrong for name, wrong in WRONG.values() if name == exercise.name]
    assert len(found) >= 3, f"{exercise.name} has {len(found)}"
    assert len(exercise.hints) == 3 and all(exercise.hints)


@pytest.mark.parametrize("exercise", [
    pytest.param(item, id=item.name, marks=swept(stem not in SOME or item.name != LAST_OF[stem]))
    for stem, item in EXERCISES])
def test_the_text_of_the_library_passes_as_on_gpus(exercise, monkeypatch):
    monkeypatch.setenv("RANKLAB_REHEARSE", "gpu")  # the solved labs judge it under the CPU's rules
    text = textwrap.dedent(inspect.getsource(exercise.answer))
    verdict = judge(exercise, as_in_a_notebook(exercise.answer, text))
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
    value = eval(prediction.solution, {"math": __import__("math")})
    state, line = judge_prediction(prediction, value)
    assert state == PASSED and line.startswith("ok    "), line
    assert not prediction.why or prediction.why in line
    for slip, confusion in (prediction.mistakes or {}).items():
        state, line = judge_prediction(prediction, slip)
        assert (state, line.endswith(confusion)) == (FAILED, True), line
    assert judge_prediction(prediction, ...)[0] == NOT_WRITTEN


def test_names_are_unique_over_all_labs():
    names = [item.name for _, item in EXERCISES] + [item.name for item in PREDICTIONS]
    assert [name for name, times in collections.Counter(names).items() if times > 1] == []


def test_every_lab_has_checks():
    assert {path.stem for path in SOURCES.glob("*.py")} <= {*labs.written(), labs.TOUR}


def test_a_mutant_that_no_longer_applies_fails_loudly():
    def right(x):
        return x + 1

    assert mutant(right, "x + 1", "x + 2", says="one more")(1) == 3
    for edits in (["x + 3", "x"], ["x", "y"], ["x + 1"], []):  # not there, twice there, no pair
        with pytest.raises(ValueError, match="right: "):
            mutant(right, *edits, says="nothing")
