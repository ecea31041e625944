"""The mock interview: a typed script and a clock that jumps; once in a real terminal."""

import json
import os
import pty
import sys
from types import SimpleNamespace

import pytest
from test_drill import marks_in, own_home, read_until  # noqa: F401  a fixture

from ranklab import cli
from ranklab.course import interview as module
from ranklab.course.drill import LETTERS, Marks
from ranklab.course.interview import MINUTES, choose, interview, kinds
from ranklab.interview.ask import draw
from ranklab.interview.bank import load
from ranklab.interview.units import show

ENDS = {"EOF": EOFError, "^C": KeyboardInterrupt}


def few(monkeypatch, *wanted):
    """These questions, as seed 0 asks them, are the bank, in the order of the interview."""
    found = [next(one for one in load() if one.id == name) for name in wanted]
    monkeypatch.setattr(module, "load", lambda: tuple(found))
    monkeypatch.setattr(module, "choose", lambda bank, wanted, marks: list(bank))
    return [draw(one, 0) for one in found]


def run(monkeypatch, argv, *replies, minutes=1.0):
    """Each reply, or (reply, its minutes), is typed in `minutes`; the rest is an end of input."""
    now, waiting = [0.0], list(replies)

    def typed(prompt=""):
        reply = waiting.pop(0) if waiting else "EOF"
        text, took = reply if isinstance(reply, tuple) else (reply, minutes)
        now[0] += 60 * took
        if text in ENDS:
            raise ENDS[text]
        return text

    monkeypatch.setattr("builtins.input", typed)
    assert interview([*argv, "--seed", "0"], clock=lambda: now[0]) == 0


def sheet_in(folder):
    sheets = json.loads((folder / "interviews.json").read_text())
    return sheets[max(sheets)]


def right(asked):
    if asked.options:
        return LETTERS[asked.options.index(asked.answer)]
    return show(asked.answer, asked.unit)


MIX = ("ring-bytes", "both-send-first", "why-a-hang")


def test_all_of_it(own_home, monkeypatch, capsys, tmp_path):  # noqa: F811
    number, choice, hang = few(monkeypatch, *MIX)
    wrong = LETTERS[1 - choice.options.index(choice.answer)]
    made = ["y"] * (len(hang.rubric) - 1) + ["perhaps", "n"]
    path = tmp_path / "deep" / "report.md"
    run(monkeypatch, ["--report", str(path), "--minutes", "11"], "dunno", right(number), wrong,
        "Ranks wait.", "", "So it hangs.", ".", *made)
    printed, written = capsys.readouterr().out, path.read_text()
    assert "3 questions in 11 minutes" in printed and "3:00 for this, 11:00 left" in printed
    assert "2:00 for this, 9:00 left" in printed and "6:00 for this, 8:00 left" in printed
    shown = " ".join(printed.split())
    assert shown.index("The interview is over.") < shown.index("ok right") < shown.index("no it is")
    last = " ".join(hang.rubric[-1].split())
    assert shown.index(last) < shown.index(" ".join(hang.answer.split())[:60])
    share = 1 - 1 / len(hang.rubric)
    assert marks_in(own_home) == {MIX[0]: [1.0], MIX[1]: [0.0], MIX[2]: [round(share, 3)]}
    assert [entry["reply"] for entry in sheet_in(own_home)["asked"]] == [
        right(number), wrong, "Ranks wait.\n\nSo it hangs."]
    assert f"3 questions are scored: {1 + share:.1f} points" in printed and "11 minutes" in written
    assert "- 00_ranks; then `ranklab drill --lab 00 --weak`" in written
    assert f"- {last}" in " ".join(written.split()) and "> So it hangs." in written
    assert "- 02_collectives" not in written and hang.answer in written


@pytest.mark.parametrize("end", ["^C", "EOF", "q"])
def test_an_end_loses_nothing(end, own_home, monkeypatch, capsys):  # noqa: F811
    number, choice, hang = few(monkeypatch, "ring-bytes", "why-a-hang", "both-send-first")
    run(monkeypatch, [], right(number), "The first line.", end, "^C")
    assert [entry["reply"] for entry in sheet_in(own_home)["asked"]] == [
        right(number), "The first line.", None]
    printed = capsys.readouterr().out
    assert "Not scored yet: why-a-hang." in printed and "Not answered: both-send-first." in printed
    assert marks_in(own_home) == {"ring-bytes": [1.0]}
    run(monkeypatch, ["--score"], *["y"] * len(choice.rubric))
    assert marks_in(own_home) == {"ring-bytes": [1.0], "why-a-hang": [1.0]}
    assert "2 of 3 questions are scored: 2.0 points" in capsys.readouterr().out


def test_each_line_is_in_the_file_before_the_next(own_home, monkeypatch):  # noqa: F811
    few(monkeypatch, "why-a-hang")
    seen = []

    def typed(prompt=""):
        seen.append(sheet_in(own_home)["asked"][0]["reply"] if seen else None)
        if len(seen) >= 3:
            raise EOFError
        return f"line {len(seen)}"

    monkeypatch.setattr("builtins.input", typed)
    interview(["--seed", "0"])
    assert seen[:3] == [None, "line 1", "line 1\nline 2"]


def test_the_time_ends_an_answer_and_the_interview(own_home, monkeypatch, capsys):  # noqa: F811
    hang, _ = few(monkeypatch, "why-a-hang", "ring-bytes")
    run(monkeypatch, ["--minutes", "8"], ("One.", 7), ("Two.", 2), *["y"] * len(hang.rubric))
    assert [entry["reply"] for entry in sheet_in(own_home)["asked"]] == ["One.\nTwo.", None]
    assert "9:00 of 8 minutes" in capsys.readouterr().out
    run(monkeypatch, ["--minutes", "8"], ("", 9))
    assert sheet_in(own_home)["asked"][0]["reply"] is None  # too late is not passed
    assert "1" not in marks_in(own_home)["why-a-hang"][1:]


def test_what_is_passed_is_wrong(own_home, monkeypatch, capsys):  # noqa: F811
    few(monkeypatch, *MIX)
    run(monkeypatch, [], "", "", "")
    assert set(sum(marks_in(own_home).values(), [])) == {0.0}
    assert "0.0 points" in capsys.readouterr().out


# -- what is asked

@pytest.mark.parametrize("minutes", [0.1, 10, 29, 30, 45, 90, 240])
def test_the_time_is_filled_with_a_mix(minutes):
    found = kinds(minutes)
    assert ("design" in found) == (minutes >= 30) and "design" not in found[:-1]
    if minutes >= 10:
        assert minutes - 6 < sum(MINUTES[kind] for kind in found) <= minutes
    if minutes == 45:
        assert [found.count(kind) for kind in MINUTES] == [4, 3, 2, 1]


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_drawn_by_level_and_weakness_from_many_labs(level, tmp_path):
    marks, wanted = Marks(tmp_path / "drill.json"), SimpleNamespace(minutes=45, level=level, seed=1)
    chosen = choose(load(), wanted, marks)
    assert [one.kind for one in chosen] == kinds(45) and len({one.lab for one in chosen}) >= 9
    others = [one for one in chosen if one.kind != "design"]
    assert all(abs(one.level - level) <= 1 for one in others)
    assert choose(load(), wanted, marks) == chosen
    assert choose(load(), SimpleNamespace(minutes=45, level=level, seed=2), marks) != chosen
    numbers = [one for one in load() if one.kind == "number" and one not in chosen]
    weak = next(one for one in numbers if abs(one.level - level) == 1)
    far = next(one for one in numbers if abs(one.level - level) > 1)
    marks.history = {one.id: [1.0] for one in load()} | {weak.id: [1.0, 0.2], far.id: [0.2]}
    again = choose(load(), wanted, marks)
    assert weak == again[0] and far not in again
    marks.history = {one.id: [1.0] for one in chosen}
    assert not {one.id for one in others} & {one.id for one in choose(load(), wanted, marks)}


# -- refusals, and a terminal

def test_nothing_to_score_and_a_home_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RANKLAB_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(SystemExit):
        cli.main(["interview", "--score"])
    assert "holds no interview to score" in capsys.readouterr().err
    hang, = few(monkeypatch, "why-a-hang")
    run(monkeypatch, [], "One.", "Two.", "Three.", ".", *["y"] * len(hang.rubric))
    printed = capsys.readouterr().out
    assert printed.count("interviews is not kept") == 1 and "1 of 1 questions are scored" in printed


def test_in_a_terminal_the_bell_rings_and_the_line_stays(own_home):  # noqa: F811
    command = [sys.executable, "-m", "ranklab.cli", "interview", "--minutes", "0.05", "--seed", "0"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(command[0], command)
    try:
        screen = read_until(terminal, " > ")
        os.write(terminal, b"12")
        screen = read_until(terminal, "Time is over.", screen)  # 3 seconds after it began
        os.write(terminal, b"34\r")
        screen = read_until(terminal, "# Mock interview", screen)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(terminal)
    assert sheet_in(own_home)["asked"][0]["reply"] == "1234"
