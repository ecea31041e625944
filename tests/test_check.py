"""check, hint and answer: what a learner reads, and that nothing of it blocks the lab."""

import decimal
import fractions
import html
import math
import re
import sys
import time
import types

import cloudpickle
import nbclient
import nbformat
import numpy as np
import pytest
import torch
import torch.distributed as dist

from ranklab import answer, check, hint, ranks
from ranklab.checks import exercise, failures, trial
from ranklab.checks.exercise import Exercise, Mistake, Prediction
from ranklab.checks.formula import Formula
from ranklab.checks.trial import on_ranks
from ranklab.course import alive, index, labs, progress, show
from ranklab.course.check import (
    FAILED, LIBRARYS, PASSED, Verdict, is_stub, judge, judge_prediction,
)

HINTS = ("think", "think harder", "it is MIN")
MINE = "all_ranks_finite"  # the exercise that stands for all here, with a check of our own


@pytest.fixture(autouse=True, scope="module")
def as_in_a_notebook():
    """What is defined here travels to the ranks by value."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Records of this test only."""
    monkeypatch.setenv("RANKLAB_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RANKLAB_ANSWERS", raising=False)
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def exercises(monkeypatch):
    """One exercise and one prediction, found by name."""
    exercise = Exercise(ranks.all_ranks_finite, _check, HINTS)
    number = Prediction("megabytes", "2 * 3 / 4 * 100", lambda: 150.0, "MB",
                        {200: "that is 2 N", 1200: "bits, not bytes", 150.5: "that is no ring"},
                        "Nearly twice the gradient.", hint="Two halves.")
    monkeypatch.setattr(labs, "find_exercise", {MINE: exercise}.get)
    monkeypatch.setattr(labs, "find_prediction", {"megabytes": number}.get)
    monkeypatch.setattr(index, "find", lambda name: None)  # it would have the library's hints
    return exercise


def _trial(learner_fn):
    return learner_fn(torch.tensor(1.0 if dist.get_rank() else float("nan")))


def _check(learner_fn):
    if learner_fn(None) != "nothing":
        raise Mistake("None gives something", "Look at None first.\nThen at the rest.")
    yield "right for None"
    seen = on_ranks(_trial, learner_fn, ranks=2, timeout=3)
    if seen != [False, False]:
        raise Mistake(f"the ranks answer {seen}", "Reduce the flag.")
    yield "right on 2 ranks"


def own_functions(loss, group=None):
    if loss is None:
        return "nothing"
    flag = torch.isfinite(loss).int()
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def named(function, name=MINE):
    function.__name__ = name
    return function


# --- what is printed and returned ---------------------------------------------------------------

def test_a_right_answer_is_returned_and_recorded(capsys):
    mine = named(own_functions)
    assert check(mine) is mine
    assert capsys.readouterr().out == (
        "all_ranks_finite\n"
        "  ok    right for None\n"
        "  ok    right on 2 ranks\n"
        "  ->    passed; next: token_round_ms (Further)\n")
    assert progress.load()[MINE]["state"] == PASSED and "when" in progress.load()[MINE]


def test_the_first_mistake_is_shown_with_its_hint_and_the_library_takes_over(capsys):
    wrong = named(lambda loss, group=None: "nothing" if loss is None else True)
    assert check(wrong) is ranks.all_ranks_finite
    out = capsys.readouterr().out
    check(named(lambda loss, group=None: 0))
    assert capsys.readouterr().out == (
        "all_ranks_finite\n"
        "  FAIL  None gives something\n"
        "        Look at None first.\n"
        "        Then at the rest.\n"
        "  ->    the rest of this lab uses the library's all_ranks_finite. "
        'hint("all_ranks_finite") has more.\n')
    assert out.splitlines()[1:3] == ["  ok    right for None",
                                     "  FAIL  the ranks answer [True, True]"]
    assert progress.load()[MINE] == progress.load()[MINE] | {"state": FAILED, "tries": 2}


def test_what_held_before_the_mistake_is_kept():
    verdict = judge(labs.find_exercise(MINE),
                    lambda loss, group=None: "nothing" if loss is None else True)
    assert verdict.holds == ["right for None"]
    assert verdict.mistake.what == "the ranks answer [True, True]"


def test_a_stub_starts_nothing_and_records_nothing(capsys, monkeypatch):
    def stub(loss, group=None):
        raise NotImplementedError("exercise 4.4: about 3 lines")

    monkeypatch.setattr(trial, "launch", None)
    assert check(named(stub)) is ranks.all_ranks_finite
    assert capsys.readouterr().out.splitlines()[1] == "  --    not written yet"
    assert progress.load() == {}


def test_the_librarys_own_is_named_and_records_nothing(capsys):
    assert check(ranks.all_ranks_finite) is ranks.all_ranks_finite
    assert capsys.readouterr().out.startswith(f"{MINE}\n  --    {LIBRARYS}")
    assert progress.load() == {}


def test_a_call_by_a_name_that_it_lacks_is_told_as_the_signature():
    def check_(learner):
        learner(loss=None)
        yield "never"

    mine = named(lambda flag, group=None: None)
    mine.__qualname__ = MINE
    verdict = judge(Exercise(ranks.all_ranks_finite, check_, HINTS), mine)
    assert "got an unexpected keyword argument 'loss'" in verdict.mistake.what
    assert verdict.mistake.hint == (
        f"The stub is all_ranks_finite(loss, group=None). {exercise.KEEP}")


def test_unknown_names_say_so_and_go_on(capsys):
    def shard_rang():
        pass

    assert check(test_unknown_names_say_so_and_go_on) is test_unknown_names_say_so_and_go_on
    assert check(5) == 5
    assert check(nonsense=3) is None
    assert check() is None
    assert check(shard_rang) is shard_rang
    hint("nonsense")
    answer("nonsense")
    out = capsys.readouterr().out
    assert out.count("no exercise is called") == 3
    assert "gave it: shard_range?" in out and "check: put your function" in out
    assert out.count("no prediction is called nonsense") == 1
    assert out.count("No exercise or prediction is called 'nonsense'") == 2


# --- stubs ----------------------------------------------------------------------------------------

class StubWithAMethod:
    x = 3

    def forward(self):
        raise NotImplementedError("exercise 4.1: about 2 lines")


class StubWithAProperty:
    @property
    def size(self):
        raise NotImplementedError("exercise 4.1: about 2 lines")


class NoStub:
    def forward(self):
        raise NotImplementedError("no backward for int tensors")


def raise_left_below(x):
    return x
    raise NotImplementedError("exercise 4.1: about 2 lines")


def stub_inside(x):
    def hook(y):
        raise NotImplementedError("exercise 4.1: about 2 lines")
    return hook


@pytest.mark.parametrize("learner_fn, expected", [
    (StubWithAMethod, True), (StubWithAProperty, True), (stub_inside, True),
    (torch.no_grad()(StubWithAMethod.forward), True),
    (NoStub, False), (raise_left_below, False), (len, False), (3, False), (own_functions, False),
])
def test_is_stub(learner_fn, expected):
    assert is_stub(learner_fn) is expected


# --- code that breaks -----------------------------------------------------------------------------

def judged(learner_fn):
    verdict = judge(labs.find_exercise(MINE), learner_fn)
    assert verdict.state == FAILED
    return str(verdict)


def test_a_raising_rank_shows_the_learners_line():
    def raises(loss, group=None):
        if loss is None:
            return "nothing"
        return loss.shape[7]  # this very line

    text = judged(raises)
    assert "on 2 ranks, rank " in text and "IndexError" in text
    assert "return loss.shape[7]  # this very line" in text
    assert "exercise.py" not in text and "rank.py" not in text, "no frames of ours"


def test_raising_in_the_notebooks_own_process_shows_the_learners_line():
    def raises(loss, group=None):
        return {}["absent"]

    text = judged(raises)
    assert "KeyError: 'absent'" in text and 'return {}["absent"]' in text
    assert "course/check.py" not in text


def test_sys_exit_is_a_mistake_and_does_not_end_the_notebook():
    assert "SystemExit: exit code 3" in judged(lambda loss, group=None: sys.exit(3))


def test_what_cannot_be_used_is_said_kindly():
    # The error is in the check's own line: a frame of checks/, and none of the learner's.
    source = "def bad_check(learners):\n    learners(None) + 1\n    yield 'no'"
    file = trial.__file__
    exec(compile(source, file, "exec"), scope := {})
    exercise = Exercise(ranks.all_ranks_finite, scope["bad_check"], HINTS)
    text = str(judge(exercise, lambda x, group=None: "text"))
    assert "what it returned can't be used: TypeError" in text
    assert "Does it return what the first line of its docstring says?" in text


def test_a_hang_ends_with_the_report():
    def hangs(loss, group=None):
        if loss is None:
            return "nothing"
        if dist.get_rank() == 1:
            dist.recv(torch.zeros(1), 0)  # nobody sends

    text = judged(hangs)
    assert "on 2 ranks it does not end: rank 1 of 2 " in text
    assert "slept in communication for 1 s" in text or "did not finish within 3 s" in text
    assert "rank 0  finished" in text and "waits in recv" in text and "nobody sends" in text


def test_what_cannot_travel_is_a_mistake():
    lock = __import__("threading").Lock()
    text = judged(lambda loss, group=None: "nothing" if loss is None else lock)
    assert "can't be sent to the ranks" in text


@pytest.mark.parametrize("signal", ["SIGABRT", "SIGSEGV"])  # the second once in 200
def test_a_message_too_long_gets_its_hint_whatever_signal_ends_the_rank(signal):
    words = "op.preamble.length <= op.nbytes. 10 vs 2. Received data size doesn't match"
    assert failures.why_dead(f"was killed by {signal}: {words}") == failures.TOO_LONG
    assert not failures.why_dead(f"was killed by {signal}")


# --- the library's answer is out of reach ---------------------------------------------------------

from ranklab.ranks import all_ranks_finite as held_under_another_name  # noqa: E402

CALLS = {
    "by a name of the notebook": lambda loss, group=None: held_under_another_name(loss),
    "by the module": lambda loss, group=None: ranks.all_ranks_finite(loss),
    "by an import inside": lambda loss, group=None: __import__(
        "ranklab.ranks", fromlist=["x"]).all_ranks_finite(loss),
}


@pytest.mark.parametrize("way", CALLS)
def test_calling_the_librarys_answer_is_refused(way):
    text = judged(CALLS[way])
    assert "it calls the library's own all_ranks_finite" in text
    assert "Write the core yourself" in text


@pytest.mark.parametrize("way", CALLS)
def test_calling_the_librarys_answer_inside_ranks_is_refused(way):
    call = CALLS[way]
    text = judged(lambda loss, group=None: "nothing" if loss is None else call(loss))
    assert "  ok    right for None" in text
    assert "  FAIL  it calls the library's own all_ranks_finite\n" in text
    assert "Write the core yourself" in text


def test_after_a_check_the_answer_works_again():
    judged(CALLS["by the module"])
    with pytest.raises(TypeError):  # its own error, no Mistake
        ranks.all_ranks_finite(None)


# --- predictions ----------------------------------------------------------------------------------

@pytest.mark.parametrize("value, line", [
    (..., "--    not predicted yet: put your number in place of ..."),
    (None, "--    not predicted yet: put your number in place of ..."),
    (150, "ok    150 MB. Nearly twice the gradient."),
    (150.9, "ok    150.9 MB. Nearly twice the gradient."),
    (fractions.Fraction(300, 2), "ok    150 MB. Nearly twice the gradient."),
    (decimal.Decimal("150.0"), "ok    150 MB."),
    (torch.tensor(150), "ok    150 MB."), (torch.tensor(150.0, dtype=torch.bfloat16), "ok    150"),
    (np.float32(150), "ok    150 MB."), (np.array(150), "ok    150 MB."),
    (150.51, "FAIL  150.51 MB: that is no ring"), (150.7, "ok    150.7 MB."),
    (200, "FAIL  200 MB: that is 2 N"),
    (np.int64(200), "FAIL  200 MB: that is 2 N"),
    (1200.0, "FAIL  1200 MB: bits, not bytes"),
    (10, 'FAIL  10 MB is too small. hint("megabytes") has more.'),
    (-150, 'FAIL  -150 MB is too small. hint("megabytes") has more.'),
    (1e3, 'FAIL  1000 MB is too large. hint("megabytes") has more.'),
    ("150", "FAIL  a number is wanted"),
    (150j, "FAIL  a number is wanted"),
    (True, "FAIL  a number is wanted"), (torch.tensor(True), "FAIL  a number is wanted"),
    (float("nan"), "FAIL  a number is wanted"), (decimal.Decimal("sNaN"), "FAIL  a number"),
    (10**400, "FAIL  a number is wanted"), (torch.empty((), device="meta"), "FAIL  a number is"),
    ([150], "FAIL  a number is wanted"), (np.ones((3, 3)), "FAIL  a number is wanted"),
])
def test_predictions(value, line, capsys):
    assert check(megabytes=value) is None
    name, text, *last = capsys.readouterr().out.splitlines()
    assert name == "megabytes" and text.startswith(f"  {line}")
    assert last == ["  ->    passed"] * line.startswith("ok")  # it stands in no lab
    known = progress.load().get("megabytes", {}).get("state")
    assert known == {"--": None, "ok": PASSED, "FA": FAILED}[line[:2]]


@pytest.mark.parametrize("name, value, sentence", [
    ("token_round_ms", 20.46, "one more brings the token home"), ("token_round_ms", 20.5, ""),
    ("token_round_ms", 20, ""), ("top_k_break_even", 101, "it already sends more"),
    ("top_k_break_even", 99, "it still sends less"), ("top_k_break_even", 100.4, "a whole number"),
    ("samples_per_rank", 449, "one image would be left out")])
def test_a_number_that_is_off_by_one_is_told_so(name, value, sentence, monkeypatch):
    monkeypatch.undo()
    state, line = judge_prediction(labs.find_prediction(name), value)
    assert (state, sentence in line) == (FAILED if sentence else PASSED, True), line


@pytest.mark.parametrize("right, value, state, words", [
    (24.74, 25, PASSED, "25 h, 24.74 rounded."), (26.54, 27, PASSED, ""), (1.575, 1.6, PASSED, ""),
    (24.74, 24, FAILED, "too small"), (24.74, 25.2, FAILED, "too large"), (24.74, 20, FAILED, ""),
    (1234, 1200, PASSED, "1200 h, 1234 rounded."), (1234, 1000, FAILED, "")])
def test_usual_rounding_is_right(right, value, state, words):
    prediction = Prediction("hours", "right", lambda: right, "h", tolerance=0.005)
    told, line = judge_prediction(prediction, value)
    assert (told, words in line) == (state, True), line


def test_what_is_counted_is_not_rounded_and_a_fraction_is_not_asked_to_be_whole():
    count = Prediction("count", "1234", lambda: 1234, tolerance=0)
    assert judge_prediction(count, 1200) == (FAILED, 'FAIL  1200 is too small. hint("count") has '
                                             'more.')
    share = Prediction("share", "7 / 4", lambda: 1.75, tolerance=0)
    assert "whole" not in judge_prediction(share, 3.5)[1]
    percent = Prediction("percent", "85", lambda: 85, "%")
    assert judge_prediction(percent, 0.85)[1] == "FAIL  0.85 is a share. In % it is 85"


@pytest.mark.parametrize("value, words", [
    (1048576, "1,048,576 B"), (1048576.4, "1,048,576 B"), (0.25, "0.25 B"), (1e300, "1e+300 B")])
def test_a_predicted_number_is_shown_as_a_person_would_write_it(value, words):
    prediction = Prediction("nbytes", "7", lambda: 7.0, "B")
    assert words in judge_prediction(prediction, value)[1]


@pytest.mark.parametrize("formula, sentence", [
    (lambda a, b, c: c * a / b, ""), (lambda *numbers: numbers[0] / numbers[1] * numbers[2], ""),
    (lambda tokens, flops, bandwidth: torch.tensor(tokens, dtype=torch.float64) * bandwidth / flops,
     ""),
    (lambda bandwidth, flops, tokens: tokens * bandwidth / flops, ""),
    (lambda a, b, c: 3 * a * c / b, "it is 3 times the right one at all 24 points"),
    (lambda a, b, c: a * c, "when flops doubles, from tokens="),
    (lambda a, b, c: a * c / b + 1, "when tokens doubles"),
    (lambda a, b, c: round(a * c / b), "grows by a factor of"),
    (lambda a, b, c: a * c / b / 2, "2 are forward's"),
    (lambda a, b: a, "can't be called with 3 numbers"), (524, "a formula is wanted: lambda tokens"),
    (lambda a, b, c: a / 0, "it raises ZeroDivisionError"),
    (lambda a, b, c: "many", "which is not a number"), (lambda a, b, c: math.inf, "it gives inf")])
def test_a_formula_is_tried_and_what_is_seen_of_it_is_said(formula, sentence, monkeypatch):
    monkeypatch.undo()
    state, line = judge_prediction(labs.find_prediction("largest_data_parallel"), formula)
    assert (state, sentence in line) == (FAILED if sentence else PASSED, True), line


# --- on the screen --------------------------------------------------------------------------------

LONG = "on 4 ranks, rank 2 sends " + "5.0 MB, " * 20 + "and nobody takes " + "x" * 120


def test_no_line_is_longer_than_100_columns(capsys):
    assert show.wrap("short\n\n  ok    as it is") == "short\n\n  ok    as it is"
    show.show(str(Verdict("ring", FAILED, [LONG], Mistake(LONG, f"{LONG}\n    at: {LONG}"))))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100 and lines[1].startswith("  ok    on 4 ranks")
    assert all(line.startswith(" " * 8) or line[2:4] in ("ok", "FA", "->") for line in lines[1:])
    hint(MINE)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


@pytest.fixture
def notebook(monkeypatch):
    """What a Jupyter kernel would be given to display."""
    shown = []
    monkeypatch.setattr("IPython.get_ipython", lambda: types.SimpleNamespace(kernel="one"))
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    return shown


def test_a_notebook_gets_colours_and_the_same_words(notebook, capsys):
    check(named(lambda loss, group=None: "nothing" if loss is None else "<b>&"))
    check(megabytes=...)
    assert capsys.readouterr().out == "" and len(notebook) == 2
    plain, coloured = notebook[0]["text/plain"], notebook[0]["text/html"]
    words = re.sub("<[^>]*>", "", coloured)
    assert html.unescape(words) == plain and "['<b>&', '<b>&']" in plain
    assert re.search(r"<b style=.color: var\(--jp-success-color1, #\w+\).>ok</b>", coloured)
    assert re.search(r"<b style=.color: var\(--jp-error-color1, #\w+\).>FAIL</b>", coloured)
    assert len(coloured) < len(plain) + 400 and "style=\"color" not in notebook[1]["text/html"]


def test_ipython_in_a_terminal_gets_plain_text(notebook, capsys, monkeypatch):
    monkeypatch.setattr("IPython.get_ipython", lambda: types.SimpleNamespace())
    check(megabytes=150)
    assert capsys.readouterr().out.startswith("megabytes\n  ok    150 MB") and not notebook


def test_a_real_kernel_keeps_both():
    cells = ["from ranklab import check", "check(hang_dollars=3)", "check(hang_dollars=341.3)"]
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    outputs = [cell.outputs for cell in nbclient.execute(made, timeout=60).cells]
    assert [len(shown) for shown in outputs] == [0, 1, 1]
    assert outputs[1][0].data["text/plain"] == (
        'hang_dollars\n  FAIL  3 dollars is too small. hint("hang_dollars") has more.')
    assert outputs[2][0].data["text/plain"].endswith("->    passed; next: 4.1 longest_shard")
    assert all("<b style=" in shown[0].data["text/html"] for shown in outputs[1:])


@pytest.mark.parametrize("mark", show.COLOURS)
@pytest.mark.parametrize("paper", ["#ffffff", "#111111"])
def test_colours_can_be_read_on_light_and_dark(mark, paper):
    def light(colour):  # relative luminance, as the rules for accessible pages define it
        parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts)) + 0.05

    colour = re.search(r"#\w{6}", show.COLOURS[mark])[0]
    low, high = sorted([light(colour), light(paper)])
    assert high / low > 4


# --- hint and answer ------------------------------------------------------------------------------

def test_one_more_hint_each_call(capsys):
    shown = []
    for _ in range(4):
        hint(MINE)
        shown.append(capsys.readouterr().out)
    advice = "     reduce a flag, not the loss: which ReduceOp?\n"  # of the stub, in labs/source
    assert shown[0] == "1/3  think\n" + advice
    assert shown[1] == shown[0] + "2/3  think harder\n"
    assert shown[2] == shown[3] and "3/3  it is MIN" in shown[2] and "answer(" in shown[2]
    assert progress.load()[MINE] == {"state": "-", "tries": 0, "hints": 3}


def test_a_predictions_hints_go_from_a_nudge_to_its_working(capsys):
    shown = []
    for _ in range(4):
        hint("megabytes")
        shown.append(capsys.readouterr().out)
    assert shown[0] == "1/3  Two halves.\n"
    assert shown[1] == shown[0] + "2/3  A usual slip is 200 MB: that is 2 N\n"
    assert shown[2] == shown[3] == shown[1] + "3/3  2 * 3 / 4 * 100 = 150 MB\n"
    answer("megabytes")
    assert capsys.readouterr().out == "2 * 3 / 4 * 100 = 150 MB\n"


def test_every_prediction_has_a_nudge_without_its_number():
    for prediction in [one for stem in labs.written() for one in labs.checks_of(stem).PREDICTIONS]:
        hints = prediction.hints
        assert len(hints) == 3 and prediction.hint == hints[0], prediction.name
        if isinstance(prediction, Formula):
            assert "=" not in hints[0] and prediction.solution not in hints[1]
            continue
        number = f"{prediction.answer():g}"
        assert not re.search(rf"\b{re.escape(number)}\b", hints[0]), prediction.name
        assert not re.match(r"(\S+) = \1 ", hints[2]), hints[2]


def test_answer_shows_the_source_by_name_or_object(capsys):
    answer(MINE)
    first = capsys.readouterr().out
    answer(ranks.all_ranks_finite)
    assert first.startswith("def all_ranks_finite(") and first == capsys.readouterr().out


def test_answers_can_be_turned_off(capsys, monkeypatch):
    monkeypatch.setenv("RANKLAB_ANSWERS", "0")
    answer(MINE)
    for _ in range(4):
        hint("megabytes")
    out = capsys.readouterr().out
    assert out.count("Answers are turned off in this class") == 4 and "2/2  A usual slip" in out
    assert "def " not in out and "150" not in out
    for _ in range(3):
        hint(MINE)
    out = capsys.readouterr().out
    assert "it is MIN" in out and "answer(" not in out


def test_an_endless_loop_in_this_process_ends(monkeypatch, exercises):
    monkeypatch.setattr(sys.modules["ranklab.course.check"], "LIMIT", 0.2)

    def endless(loss, group=None):
        while True:
            pass

    verdict = judge(exercises, endless)
    assert verdict.state == FAILED and "was not done after 0.2 s" in str(verdict)


def test_a_check_that_takes_long_says_where_it_is(monkeypatch):
    told = []
    monkeypatch.setattr(alive, "EVERY", 0.1)
    monkeypatch.setattr(alive, "_screen", lambda: told.append)

    def slow():
        time.sleep(1)

    with alive.signs_of_life("slow"):
        slow()
    assert told[0].startswith("slow: still checking after 0 s") and ", in slow" in told[0]
    assert told[-1] == ""


def test_every_answer_can_be_called():
    """A check's file has its exercise's name: the package's attribute could be the module."""
    for stem in labs.written():
        for each in labs.checks_of(stem).EXERCISES:
            assert callable(each.answer), each.answer
