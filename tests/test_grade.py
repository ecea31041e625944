"""`ranklab grade`: a bad submission costs its own row, and nothing that a notebook says counts."""

import ast
import contextlib
import csv
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import types

import cloudpickle
import psutil
import pytest
from conftest import ROOT

from ranklab.cli import main
from ranklab.course import labs
from ranklab.course.grade import grade
from ranklab.course.predicted import NOT_GRADABLE, judge_number, predictions
from ranklab.course.submitted import Notebook, has_code_of, is_forced

OF = len(labs.names_of("00_ranks"))

pytestmark = pytest.mark.timeout(300)  # the whole class is graded once, for all tests

SHARD_RANGE = """
def shard_range(n, rank, size):
    # my own words
    quotient, rest = divmod(n, size)
    first = quotient * rank + min(rest, rank)
    return range(first, first + quotient + int(rank < rest))
"""
WRONG = """
def shard_range(n, rank, size):
    each = n // size
    return range(each * rank, each * (rank + 1))
"""
STUB = 'def shard_range(n, rank, size):\n    raise NotImplementedError("exercise 4.1: 3 lines")'
TOKEN = """
import torch, torch.distributed as dist

def pass_the_token(group=None):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return 1
    token = torch.zeros(1, dtype=torch.int64)
    if rank:
        dist.recv(token, group=group, group_src=rank - 1)
    dist.send(token + 1, group=group, group_dst=(rank + 1) % size)
    if not rank:
        dist.recv(token, group=group, group_src=size - 1)
    return int(token)
"""


def write(folder, name, *cells, metadata=None):
    """A notebook with these code cells."""
    cells = [{"cell_type": "code", "source": cell, "metadata": {}, "outputs": [],
              "execution_count": None} for cell in cells]
    content = {"cells": cells, "metadata": metadata or {}, "nbformat": 4, "nbformat_minor": 5}
    path = folder / f"{name}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def graded(folder, limit):
    """The CSV's rows by submission, with the exit code under ""."""
    table = folder.parent / "table.csv"
    code = grade(folder, table, limit)
    with table.open(newline="") as file:
        return {row["submission"].removesuffix(".ipynb"): row for row in csv.DictReader(file)} | {
            "": code}


# What a class hands in, each with the cells that make it special.
SUBMISSIONS = {
    "solved": [SHARD_RANGE, "shard_range = check(shard_range)", TOKEN,
               "import math\nn, size = 1_000_003, 8",
               "check(longest_shard=math.ceil(n / size))", "check(longest_shard=...)",
               "check(guilty_rank=7, token_round_ms=1024 * 20 / 1000)",
               "check(hang_dollars=find_prediction('hang_dollars').answer())"],
    "fake_ok": ["def check(f=None, **_):\n    print('shard_range\\n  ok    all')\n    return f",
                WRONG, "shard_range = check(shard_range)"],
    "patched": ["import sys, ranklab.course.check as c, ranklab.checks.ranks as r, ranklab.ranks",
                "c.judge = lambda *_: c.Verdict('shard_range')\n"
                "r.check_shard_range = lambda _: iter(['ok'])\n"
                "ranklab.ranks.shard_range = None\n"
                "sys.modules['ranklab.course.check'] = sys.modules['json'] = None", WRONG],
    "librarys_own": ["from ranklab.ranks import shard_range", "shard_range = check(shard_range)"],
    "delegates": ["from ranklab import ranks\nmine = ranks.shard_range",
                  "def shard_range(n, rank, size):\n    return mine(n, rank, size)",
                  STUB.replace("shard_range", "all_ranks_finite"), "check(longest_shard=...)"],
    "crash": [SHARD_RANGE, "import os; os._exit(3)", TOKEN],
    "kills": ["import os, subprocess\n"
              "subprocess.Popen(['sleep', '300'], env={}, start_new_session=True)",
              SHARD_RANGE, "os.kill(os.getppid(), 9); os.kill(os.getpid(), 9)", TOKEN],
    "deletes": ["import shutil, os; shutil.rmtree(os.getcwd())", "def broken(:",
                "%matplotlib nonsense", "%%time\n" + SHARD_RANGE,
                "raise ValueError('late: after the last exercise, so it is not run')"],
    "bob/helpers": [SHARD_RANGE.replace("divmod(n", "divided(n"), "raise ValueError('not needed')",
                    "import beside", "def divided(n, size):\n    return beside.divided(n, size)"],
    "cheats": ["""
def shard_range(n, rank, size):
    import os, sys
    for fd in range(3, 30):
        try: os.write(fd, b'pass_the_token\\tpassed\\t\\n')
        except OSError: pass
    from ranklab.course import check, regrade
    regrade.judge = check.judge = lambda *_: check.Verdict('shard_range')
    shards = sys.modules['ranklab.checks.ranks.shard_range']
    shards.check_shard_range.__code__ = (lambda fn: iter([])).__code__
    return range(3)
"""],
    "kills_parent": ["def shard_range(n, rank, size):\n    import os; os.kill(os.getppid(), 9)",
                     TOKEN],
    "other": ["print('shopping list')"],
}


@pytest.fixture(scope="module", autouse=True)
def scratch(tmp_path_factory):
    """Where the notebooks of these tests run."""
    folder, before = tmp_path_factory.mktemp("scratch"), tempfile.tempdir
    tempfile.tempdir = str(folder)
    yield folder
    tempfile.tempdir = before
    assert list(folder.iterdir()) == [], "nothing is left on the disk"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class") / "handed_in"
    for name, cells in SUBMISSIONS.items():
        write(folder, name, "from ranklab import check", *cells)
    write(folder, "bob/helpers", f"import shutil; shutil.rmtree({str(folder)!r})",
          *SUBMISSIONS["bob/helpers"])
    (folder / "torn.ipynb").write_text('{"cells": [{"cell_type": "co')
    (folder / "empty.ipynb").write_text("")
    (folder / "strange.ipynb").write_text('{"cells": 3}')
    (folder / "bob" / "beside.py").write_text("divided = divmod\n")
    (folder / "link.ipynb").symlink_to("nowhere.ipynb")
    os.mkfifo(folder / "fifo.ipynb")
    write(folder, "=1+1", "print('nothing')")
    write(folder / ".ipynb_checkpoints", "old", SHARD_RANGE)
    return graded(folder, limit=200)  # nothing here waits for it, however busy the machine is


def test_every_notebook_has_a_row_in_a_fixed_order(rows):
    names = [name for name in rows if name]
    made = ["torn", "empty", "strange", "link", "fifo", "'=1+1"]  # with ' it is no formula
    assert names == sorted([*SUBMISSIONS, *made], key=lambda name: name.lstrip("'"))
    assert rows[""] == 0


def test_solved_exercises_and_numbers_pass(rows):
    row = rows["solved"]
    assert row["shard_range"] == row["pass_the_token"] == row["longest_shard"] == "passed"
    assert row["token_round_ms"] == "passed" and row["guilty_rank"].startswith("failed: 7")
    assert row["hang_dollars"].startswith("not gradable: find_prediction"), "no help from ours"
    assert row["ring_shift"] == "not written yet: it is not in the notebook"
    assert (row["passed"], row["of"], row["lab"]) == ("4", str(OF), "00_ranks")


def test_a_stub_is_not_written_yet(rows):
    assert rows["delegates"]["all_ranks_finite"] == "not written yet"
    assert rows["delegates"]["longest_shard"] == "not written yet"
    assert rows["delegates"]["passed"] == "0"


@pytest.mark.parametrize("name", ["fake_ok", "patched"])
def test_what_the_notebook_says_about_itself_is_not_believed(rows, name):
    assert rows[name]["shard_range"].startswith("failed: n=")
    assert "nobody has" in rows[name]["shard_range"]
    assert rows[name]["passed"] == "0"


def test_the_librarys_own_does_not_count(rows):
    assert rows["librarys_own"]["shard_range"].startswith("the library's own")
    assert "calls the library's own shard_range" in rows["delegates"]["shard_range"]


@pytest.mark.parametrize("name", ["crash", "kills", "deletes"])
def test_what_was_defined_before_or_after_the_accident_counts(rows, name):
    assert rows[name]["shard_range"] == "passed", rows[name]


def test_the_note_says_what_happened_and_where(rows):
    assert rows["crash"]["note"] == "ended its process in code cell 3"
    assert rows["kills"]["note"] == "ended its process in code cell 4"
    assert rows["crash"]["pass_the_token"].endswith("its cell was not reached, or failed")
    assert rows["deletes"]["note"].startswith("code cell 3: SyntaxError")
    assert rows["other"]["note"] == "no exercise of a lab is in it"
    assert rows["torn"]["note"] == rows["empty"]["note"] == "unreadable: it is not JSON"
    assert rows["strange"]["note"].startswith("unreadable: it has no cells")
    assert rows["link"]["note"] == "unreadable: it is a link that leads nowhere"
    assert rows["fifo"]["note"] == "unreadable: it is not a file"
    assert rows["solved"]["note"] == ""


def test_helpers_below_the_last_exercise_and_beside_the_notebook_are_found(rows):
    assert rows["bob/helpers"]["shard_range"] == "passed"
    assert rows["bob/helpers"]["note"] == "", "only the cells that it needs are run"


def test_what_a_function_does_to_its_judge_is_not_believed(rows):
    row = rows["cheats"]
    assert row["passed"] == "0" and row["pass_the_token"].startswith("not written yet")
    assert row["shard_range"].startswith("failed: it changed "), row
    assert row["note"].startswith("shard_range wrote to the grader by itself; "), row
    assert row["note"].endswith("it names ranklab.course, regrade, ranklab.checks, __code__")


def test_a_function_that_kills_its_judges_parent_fails_alone(rows):
    assert rows["kills_parent"]["shard_range"].startswith("failed: ")
    assert rows["kills_parent"]["pass_the_token"] == "passed"


def test_what_torch_changes_by_itself_is_no_trick():
    code = """
from ranklab.course import labs, regrade
before = regrade._meanings(labs.find_exercise('shard_range'))
import torch._dynamo
print([key for _, names, key, item, _ in before if names.get(key) is not item])
print(sum((label, key) == ('torch', 'equal') for label, _, key, _, _ in before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n1\n", done.stdout + done.stderr


def test_nothing_that_a_notebook_started_is_left(rows, scratch):
    assert left_over(scratch) == []


def left_over(scratch):
    """The processes of graded notebooks that are still there after some seconds."""
    end = time.monotonic() + 10
    while (found := marked(scratch)) and time.monotonic() < end:
        time.sleep(0.1)  # a killed process takes a moment to be gone on a busy machine
    return found


def marked(scratch):
    """Those of this test only: another run on this machine has its own scratch."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd().startswith(str(scratch)):
                found.append(process)
    return found


@pytest.fixture(scope="module")
def slow_rows(tmp_path_factory):
    """Those that never end. One cell may take 0.3 of their 8 seconds."""
    folder = tmp_path_factory.mktemp("slow") / "handed_in"
    write(folder, "endless", "while True: print('x' * 1000)", SHARD_RANGE)
    write(folder, "stubborn", SHARD_RANGE,
          "import time\nwhile True:\n    try: time.sleep(1)\n    except BaseException: pass", TOKEN)
    write(folder, "in_check", "def shard_range(n, rank, size):\n    while True: pass",
          "check(guilty_rank=2)", "check(longest_shard=1)")
    write(folder, "ends_judge", "def shard_range(n, rank, size):\n    import os; os._exit(0)",
          "check(guilty_rank=2)")
    return graded(folder, limit=8)


def test_an_endless_cell_is_interrupted_and_the_rest_runs(slow_rows):
    assert slow_rows["endless"]["note"] == "code cell 1: took longer than 2.4 s"
    assert slow_rows["endless"]["shard_range"] == "passed"


def test_a_cell_that_cannot_be_interrupted_ends_its_own_notebook_only(slow_rows):
    assert slow_rows["stubborn"]["note"] == "ran out of time in code cell 2"
    assert slow_rows["stubborn"]["shard_range"] == "passed"


def test_a_function_that_hangs_or_ends_its_judge_fails_alone(slow_rows):
    assert slow_rows["in_check"]["shard_range"] == "failed: its check ran out of time"
    assert slow_rows["ends_judge"]["shard_range"].startswith("failed: it ended the process")
    assert slow_rows["in_check"]["guilty_rank"] == "passed"
    assert slow_rows["ends_judge"]["guilty_rank"] == "passed"


def test_the_librarys_text_is_known_and_no_note_where_the_stub_forces_it(tmp_path):
    token, shards = map(labs.find_exercise, ("pass_the_token", "shard_range"))
    source = inspect.getsource(token.answer).replace("(group=None)", "(group: int = None) -> int")
    write(tmp_path, "copied", source.replace("# the", "# THE"), SHARD_RANGE)
    notebook = Notebook(tmp_path / "copied.ipynb")
    assert notebook.has_library_text(token) and not notebook.has_library_text(shards)
    assert is_forced(shards, "00_ranks") and not is_forced(token, "00_ranks")
    (tmp_path / "beside").mkdir()
    write(tmp_path / "beside", "imports", "from mine import pass_the_token")
    (tmp_path / "beside" / "mine.py").write_text(inspect.getsource(token.answer))
    assert Notebook(tmp_path / "beside" / "imports.ipynb").has_library_text(token)


def test_a_stub_that_runs_is_not_written_until_it_is_touched(tmp_path):
    """ring_shift's stub is code that deadlocks, and no mistake of a learner's."""
    lab = ROOT / "labs" / "00_ranks.ipynb"
    assert {"ring_shift", "shard_range"} <= Notebook(lab).untouched
    changed = tmp_path / "00_ranks.ipynb"
    changed.write_text(lab.read_text().replace("from_before = torch", "before = torch"))
    assert "ring_shift" not in Notebook(changed).untouched


def test_the_librarys_code_is_known_by_whatever_way_it_came():
    exercise = labs.find_exercise("shard_range")
    spaces = {"__name__": "__main__"}
    exec(SHARD_RANGE + inspect.getsource(exercise.answer).replace("shard_range", "mine"), spaces)
    mine, own = spaces["mine"], spaces["shard_range"]
    for learner_fn in (mine, lambda *args: mine(*args), types.FunctionType(mine.__code__, {})):
        assert has_code_of(exercise, cloudpickle.dumps(learner_fn))
    assert not has_code_of(exercise, cloudpickle.dumps(own))
    own.__code__ = exercise.answer.__code__
    assert has_code_of(exercise, cloudpickle.dumps(own))


@pytest.mark.parametrize("cell, words", [
    ("runpy.run_path(ranks.__file__)", ["runpy", "__file__"]),
    ("f.__code__ = g.__code__", ["__code__"]),
    ("exec(text); __import__('x')", ["exec", "__import__"]), ("model.eval(); executed()", []),
    ("sys.path.insert(0, os.path.dirname(ranklab.__file__))\nimport ranks",
     ["sys.path", "__file__"]),
    ("shutil.copy(ranks.__file__, 'mine.py')\nfrom mine import shard_range", ["__file__"]),
    ("sys.setprofile(None)\nreturn ranks.shard_range(n, rank, size)", ["setprofile"]),
    ("code.InteractiveInterpreter(names).runsource('x = 1\\n' + text, symbol='exec')",
     ["InteractiveInterpreter"]),
])
def test_the_words_that_no_answer_needs_are_noted(tmp_path, cell, words):
    write(tmp_path, "a", cell)
    assert Notebook(tmp_path / "a.ipynb").tricks() == words


def test_every_working_passes():
    for stem in labs.written():
        for item in labs.checks_of(stem).PREDICTIONS:
            assert judged(item.name, item.solution)[0] == "passed", item.name


def judged(name, text, *before):
    """(state, reason) of a prediction in a notebook with these cells before it."""
    trees = [ast.parse(cell) for cell in (*before, f"check({name}={text})")]
    item = labs.find_prediction(name)
    return judge_number(item, *predictions(trees, {name})[name])


@pytest.mark.parametrize("text, before", [
    ("m.ceil(n / size)", ["import math as m; n = 10 ** 6 + 3", "size = 4", "size = 2 * 4"]),
    ("ceil(n / 8)", ["from math import ceil", "(n, _), m = (1000003, 2), 1", "def f(m): n = 3"]),
    ("int(1_000_003 / 8) + round(0.9)", []),
])
def test_a_number_may_be_computed_from_names(text, before):
    assert judged("longest_shard", text, *before)[0] == "passed"


@pytest.mark.parametrize("text, before", [
    ("n", []), ("n", ["n = 125_001", "for n in range(3): pass"]), ("open('/x')", []),
    ("find_prediction('longest_shard').answer()", []), ("n", ["n = 125_001", "n = len(range(9))"]),
    ("n", ["n = 2 ** 100", *["n = n * n"] * 30]), ("round(5, -10 ** 10) + math.factorial(9)", []),
])
def test_what_needs_the_notebook_is_not_gradable(text, before):
    assert judged("longest_shard", text, *before)[0] == NOT_GRADABLE


def test_the_lab_is_found_by_metadata_or_by_names(tmp_path):
    write(tmp_path, "a", "x = 1", metadata={"ranklab": {"stem": "00_ranks"}})
    write(tmp_path, "b", "check(guilty_rank=...)")
    write(tmp_path, "c", "x = 1", metadata={"ranklab": {"stem": "../.."}})
    stems = [Notebook(tmp_path / f"{name}.ipynb").stem for name in "abc"]
    assert stems == ["00_ranks", "00_ranks", None]


def test_no_notebook_or_no_place_for_the_table_is_one_sentence(tmp_path, capsys):
    assert grade(tmp_path, None, 1) == 2
    assert capsys.readouterr().out == f"ranklab grade: there is no notebook in {tmp_path}\n"
    write(tmp_path, "a", "x = 1")
    assert grade(tmp_path, tmp_path / "a.ipynb" / "table.csv", 1) == 2
    assert capsys.readouterr().out.startswith("ranklab grade: the table can't be written")


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "ten"])
def test_minutes_that_are_no_time_are_one_sentence(tmp_path, capsys, minutes):
    with pytest.raises(SystemExit) as stop:
        main(["grade", str(tmp_path), f"--minutes={minutes}"])
    assert stop.value.code == 2
    assert f"above 0 and at most 1440 is wanted, not '{minutes}'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_read_costs_its_own_row(tmp_path, monkeypatch, capsys):
    write(tmp_path / "open", "a", "x = 1")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(path):  # a test that runs as root could not close a folder
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert grade(tmp_path, tmp_path / "new" / "table.csv", 1) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].split() == ["closed", "-", "unreadable:", "Permission", "denied"]
    assert out[2].startswith("open/a.ipynb")


@pytest.mark.parametrize("number", [
    signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.sweep)])
def test_a_signal_ends_it_and_keeps_what_is_graded(tmp_path, number):
    folder, table = tmp_path / "in", tmp_path / "table.csv"
    write(folder, "a", "print('nothing')")
    write(folder, "b", f"open({str(tmp_path / 'begun')!r}, 'w').close()\nwhile True: pass", STUB)
    command = [sys.executable, "-m", "ranklab.cli", "grade", str(folder), "--csv", str(table)]
    (tmp_path / "scratch").mkdir()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "TMPDIR": str(tmp_path / "scratch")})
    deadline = time.monotonic() + 150
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "a.ipynb" in table.read_text(), "each row is written at once"
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number and "Traceback" not in err
    assert err.strip() == "stopped: 1 of 2 are graded"
    assert "a.ipynb" in table.read_text() and "b.ipynb" not in table.read_text()
    assert left_over(tmp_path) == [] and list((tmp_path / "scratch").iterdir()) == []
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["begun", "in", "scratch", "table.csv"]
