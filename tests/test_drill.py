"""The drill: driven by a list of replies, through a pipe, and through a real pseudo-terminal."""
import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest

from ranklab import cli
from ranklab.course import drill as module
from ranklab.course.drill import Marks, choose, drill
from ranklab.interview.ask import draw
from ranklab.interview.bank import load
from ranklab.interview.units import scale

COMMAND = [sys.executable, "-c",
           "import sys; from ranklab.course.drill import drill; sys.exit(drill(sys.argv[1:]))"]
ENDS = {"EOF": EOFError, "^C": KeyboardInterrupt}


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("RANKLAB_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run(monkeypatch, argv, reply):
    """The exit code of a drill in which `reply(prompt)` answers; "EOF" and "^C" end it."""
    def fake_input(prompt=""):
        print(prompt, end="")
        text = reply(prompt)
        if text in ENDS:
            raise ENDS[text]
        print(text)
        return text
    monkeypatch.setattr("builtins.input", fake_input)
    return drill(argv)


def one(monkeypatch, name, times=1):
    """The question `name` as seed 0 asks it; it is now all that the bank holds."""
    question = next(entry for entry in load() if entry.id == name)
    monkeypatch.setattr(module, "load", lambda: (question,) * times)
    return draw(question, 0)


def replies(*texts):
    waiting = list(texts)
    return lambda prompt: waiting.pop(0) if waiting else "EOF"


def marks_in(folder):
    return json.loads((folder / "drill.json").read_text())


# -- judging

def test_a_right_number_is_right(own_home, monkeypatch, capsys):
    asked = one(monkeypatch, "local-rank")
    assert run(monkeypatch, ["--seed", "0"], replies(f"{asked.answer:g}")) == 0
    printed = capsys.readouterr().out
    assert "ok    right" in printed and "1 of 1 right." in printed
    assert marks_in(own_home) == {"local-rank": [1.0]}


def test_a_known_wrong_number_is_told_what_it_confuses(own_home, monkeypatch, capsys):
    asked = one(monkeypatch, "local-rank")
    run(monkeypatch, ["--seed", "0"], replies(f"{asked.wrong[0][0]:g}"))
    printed = " ".join(capsys.readouterr().out.split())
    assert f"no it is {asked.shown_answer()}, not {asked.wrong[0][0]:g}." in printed
    assert "That is the global rank." in printed and "Weak: local-rank." in printed
    assert marks_in(own_home) == {"local-rank": [0.0]}


@pytest.mark.parametrize("factor, says", [
    (8, "bits for bytes"), (1000, "power of ten"), (2, "off by exactly 2"), (5.37, "")])
def test_usual_slips_are_named(factor, says, own_home, monkeypatch, capsys):
    asked = one(monkeypatch, "ring-bytes")
    value = asked.answer * factor / scale(asked.unit)
    run(monkeypatch, ["--seed", "0"], replies(f"{value:.9g}"))
    printed = capsys.readouterr().out
    assert "no    it is" in printed and says in printed


def test_numbers_in_every_spelling(own_home, monkeypatch, capsys):
    asked = one(monkeypatch, "ring-bytes")
    size = asked.answer
    for text in (f"{size:.9g} B", f"{size / 1e9:.9g}GB", f"{size / 2**20:.9g} MiB",
                 f"{size / scale(asked.unit) * 3:.9g}/3"):
        run(monkeypatch, ["--seed", "0"], replies(text))
        assert "ok    right" in capsys.readouterr().out, text


TOO_LARGE = ["1e999", "1e99*1e99*1e99", "9**110", "1e308 TB", "-1e101"]
ODD = [*TOO_LARGE, "0**-1", "1/0", "\u00b2", "(-8)**.5", "(-8)**.5//1", "9**99**99", "(9**99)**99",
       "9**9999**0*9**999", "(" * 9000, "-" * 9000 + "1"]


def test_an_unreadable_number_is_asked_again(own_home, monkeypatch, capsys):
    asked = one(monkeypatch, "ring-bytes")
    tries = ("dunno", "3 parsecs", "3 s", *ODD, f"{asked.answer:.9g} B")
    run(monkeypatch, ["--seed", "0"], replies(*tries))
    printed = capsys.readouterr().out
    assert "I cannot read 'dunno' as a number" in printed and "the unit 'parsecs'" in printed
    assert "'s' measures a time; the question asks for a size in MB." in printed
    assert "ok    right" in printed and "'1e999' is too large" in printed
    assert printed.count("I cannot read") + printed.count("is too large") == 1 + len(ODD)


def test_a_choice(own_home, monkeypatch, capsys):
    asked = one(monkeypatch, "both-send-first")
    right = asked.options.index(asked.answer)
    run(monkeypatch, ["--seed", "0"], replies("z", "ab", "abcd"[right].upper() + ")"))
    printed = capsys.readouterr().out
    assert printed.count("one letter of a, b, c, d, please.") == 2 and "ok    right" in printed
    run(monkeypatch, ["--seed", "0"], replies("abcd"[right - 1]))
    printed = " ".join(capsys.readouterr().out.split())
    confuses = dict(asked.wrong)[asked.options[right - 1]]
    assert f"no it is {'abcd'[right]}." in printed and " ".join(confuses.split()) in printed
    assert marks_in(own_home) == {"both-send-first": [1.0, 0.0]}


def test_an_open_question_shows_its_rubric_and_takes_a_score(own_home, monkeypatch, capsys):
    asked = one(monkeypatch, "why-a-hang")
    points = len(asked.rubric)
    run(monkeypatch, ["--seed", "0"], replies("", "99", "\u00b2", "some", str(points - 1)))
    printed = " ".join(capsys.readouterr().out.split())
    assert all(" ".join(point.split()) in printed for point in asked.rubric)
    assert f"a number from 0 to {points}, please." in printed
    assert marks_in(own_home) == {"why-a-hang": [round((points - 1) / points, 3)]}


# -- choosing and keeping score

def test_lab_level_and_count_choose(own_home, monkeypatch, capsys):
    options = ["--lab", "00", "--level", "2", "--count", "3", "--seed", "1"]
    run(monkeypatch, options, lambda prompt: "")
    printed = capsys.readouterr().out
    assert printed.count(", level ") == printed.count("00_ranks, level 2") == 3


def test_the_whole_bank_can_be_asked(own_home, monkeypatch, capsys):
    assert run(monkeypatch, ["--count", "1000", "--seed", "2"], lambda prompt: "") == 0
    assert f"of {len(load())} right." in capsys.readouterr().out
    assert set(marks_in(own_home)) == {question.id for question in load()}


def test_weak_ones_come_again_until_they_sit(own_home, monkeypatch, capsys):
    asked = one(monkeypatch, "local-rank")
    run(monkeypatch, ["--weak"], replies(""))
    assert "no question fits and is weak: none was asked yet." in capsys.readouterr().out
    run(monkeypatch, ["--seed", "0"], replies(""))         # Enter alone: not known
    assert f"->    {asked.shown_answer()}" in capsys.readouterr().out
    for _ in range(2):                       # once right is luck, twice is known
        run(monkeypatch, ["--weak", "--seed", "0"], replies(f"{asked.answer:g}"))
        assert "1 of 1 right." in capsys.readouterr().out
    run(monkeypatch, ["--weak", "--seed", "0"], replies())
    assert "Nothing to ask: no question fits and is weak. Well done" in capsys.readouterr().out
    assert marks_in(own_home) == {"local-rank": [0.0, 1.0, 1.0]}


def test_new_questions_come_before_those_that_sit(tmp_path):
    bank, marks = load(), Marks(tmp_path / "drill.json")
    for question in bank[:-1]:
        marks.add(question.id, 1.0)
    wanted = module._parser().parse_args(["--seed", "3", "--count", "1"])
    assert choose(bank, wanted, marks) == [bank[-1]]


def test_the_same_seed_asks_the_same(own_home, monkeypatch, capsys):
    run(monkeypatch, ["--seed", "7", "--count", "4"], replies("q"))
    first = capsys.readouterr().out
    run(monkeypatch, ["--seed", "7", "--count", "4"], replies("q"))
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("argv, code, sentence", [
    (["--lab", "99"], 2, "no lab is called '99'"), (["--level", "9"], 2, "and at most 5 is wanted"),
    (["--count", "0"], 2, "of at least 1 is wanted, not '0'"),
    (["--seed", "x"], 2, "a whole number is wanted"), (["--count", "\u00b2"], 2, "is wanted"),
    (["--lab", "00", "--level", "5"], 0, "Nothing to ask"),
    (["--help"], 0, "only those you did not know")])
def test_options_that_lead_to_no_question(argv, code, sentence, own_home, capsys):
    with pytest.raises(SystemExit) as end:
        sys.exit(cli.main(["drill", *argv]))
    assert end.value.code == code
    printed = capsys.readouterr()
    assert sentence in printed.out + printed.err


@pytest.mark.parametrize("text", ["{", "[1, 2]", '{"local-rank": 3}', '{"local-rank": ["a"]}'])
def test_a_broken_score_file_is_no_disaster(text, own_home, monkeypatch, capsys):
    own_home.mkdir()
    (own_home / "drill.json").write_text(text)
    asked = one(monkeypatch, "local-rank")
    assert run(monkeypatch, ["--seed", "0"], replies(f"{asked.answer:g}")) == 0
    printed = capsys.readouterr().out
    assert "drill.json could not be read whole: 0 records are kept" in printed
    assert (own_home / "drill.bad.json").read_text() == text
    assert marks_in(own_home) == {"local-rank": [1.0]}


def test_a_home_that_cannot_be_written_still_drills(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RANKLAB_HOME", str(tmp_path / "file" / "home"))
    assert run(monkeypatch, ["--count", "1"], lambda prompt: "") == 0
    printed = capsys.readouterr().out
    assert "drill is not kept" in printed and "of 1 right." in printed


# -- the ends: q, end of input, Ctrl-C, a real terminal

@pytest.mark.parametrize("end", ["q", "EOF", "^C"])
def test_it_ends_cleanly_with_the_score(end, own_home, monkeypatch, capsys):
    asked = one(monkeypatch, "local-rank", times=3)
    assert run(monkeypatch, ["--seed", "0"], replies(f"{asked.answer:g}", end)) == 0
    assert "1 of 1 right." in capsys.readouterr().out
    assert run(monkeypatch, ["--seed", "0"], replies(end)) == 0
    assert "No question answered, no score." in capsys.readouterr().out


def test_through_a_pipe(own_home):
    done = subprocess.run([*COMMAND, "--lab", "00", "--seed", "0", "--count", "2"], input="1\n",
                          text=True, capture_output=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "1/2  00_ranks" in done.stdout


def test_in_a_terminal_control_c_ends_with_the_score(own_home):
    question, seed = first_question()
    options = ["--lab", "00", "--level", "1", "--seed", str(seed)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(COMMAND[0], [*COMMAND, *options])
    try:
        read_until(terminal, " > ")
        os.write(terminal, f"{draw(question, seed).answer:g}\n".encode())
        assert "ok    right" in read_until(terminal, " > ")
        assert "1 of 1 right." in interrupt_until(terminal, "right.")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(terminal)               # the child, if it still lives, gets a hang-up


def interrupt_until(terminal, mark):
    """What the terminal shows up to `mark`, while Ctrl-C is pressed once a second.

    Once may not do: an interrupt between the prompt and the read that follows it is lost.
    """
    screen, end = "", time.monotonic() + 60
    while mark not in screen:
        assert time.monotonic() < end, f"the terminal never showed '{mark}': {screen}"
        os.write(terminal, b"\x03")  # as the keyboard sends it
        while select.select([terminal], [], [], 1.0)[0] and mark not in screen:
            screen += os.read(terminal, 4096).decode(errors="replace")
    return screen


def first_question():
    """A number question of lab 00, level 1, and the seed with which the drill starts with it."""
    for seed in range(200):
        wanted = module._parser().parse_args(["--lab", "00", "--level", "1", "--seed", str(seed)])
        question = choose(load(), wanted, Marks(module.home() / "drill.json"))[0]
        if question.kind == "number":
            return question, seed
    raise AssertionError("no seed below 200 starts with a number")


def read_until(terminal, mark, screen=""):
    """What the terminal shows up to `mark`; fails after 60 s."""
    end = time.monotonic() + 60
    while mark not in screen:
        ready, _, _ = select.select([terminal], [], [], end - time.monotonic())
        assert ready, f"the terminal never showed '{mark}': {screen}"
        screen += os.read(terminal, 4096).decode(errors="replace")
    return screen
