"""`ranklab grade`: a bad submission costs its own row, and nothing that a notebook says counts."""

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

import psutil
import pytest

from ranklab.course import labs
from ranklab.course.grade import grade
from ranklab.course.sandbox import MARK
from ranklab.course.submitted import Notebook, names_of

OF = len(names_of("00_ranks"))

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
               "check(longest_shard=125_001)", "check(longest_shard=...)",
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
    "kills": ["import os, subprocess\nsubprocess.Popen(['sleep', '300'])",
              SHARD_RANGE, "os.kill(os.getppid(), 9); os.kill(os.getpid(), 9)", TOKEN],
    "deletes": ["import shutil, os; shutil.rmtree(os.getcwd())", "def broken(:",
                "%matplotlib nonsense", "%%time\n" + SHARD_RANGE,
                "raise ValueError('late: after the last exercise, so it is not run')"],
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
    (folder / "torn.ipynb").write_text('{"cells": [{"cell_type": "co')
    (folder / "empty.ipynb").write_text("")
    (folder / "strange.ipynb").write_text('{"cells": 3}')
    write(folder / ".ipynb_checkpoints", "old", SHARD_RANGE)
    return graded(folder, limit=200)  # nothing here waits for it, however busy the machine is


def test_every_notebook_has_a_row_in_a_fixed_order(rows):
    names = [name for name in rows if name]
    assert names == sorted([*SUBMISSIONS, "torn", "empty", "strange"])
    assert rows[""] == 0


def test_solved_exercises_and_numbers_pass(rows):
    row = rows["solved"]
    assert row["shard_range"] == row["pass_the_token"] == row["longest_shard"] == "passed"
    assert row["token_round_ms"] == "passed" and row["guilty_rank"].startswith("failed: 7")
    assert row["hang_dollars"].startswith("failed: find_prediction"), "no help from the library"
    assert row["fix_the_deadlock"] == "not written yet: it is not in the notebook"
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
    assert rows["solved"]["note"] == ""


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
            if process.environ().get(MARK, "").startswith(str(scratch)):
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


def test_the_librarys_text_is_named(tmp_path, capsys):
    source = inspect.getsource(labs.find_exercise("shard_range").answer)
    folder = tmp_path / "alice"
    write(folder, "00_ranks", source.replace("# the ranks", "# THE ranks"))
    assert grade(folder / "00_ranks.ipynb", None, 60) == 0
    assert f"1/{OF}" in capsys.readouterr().out.splitlines()[-1]
    notebook = Notebook(folder / "00_ranks.ipynb")
    assert notebook.is_copied(labs.find_exercise("shard_range"))
    write(folder, "own", SHARD_RANGE)
    assert not Notebook(folder / "own.ipynb").is_copied(labs.find_exercise("shard_range"))


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
    assert grade(tmp_path, tmp_path / "no" / "table.csv", 1) == 2
    assert capsys.readouterr().out.startswith("ranklab grade: the table can't be written")


def test_ctrl_c_ends_it_and_keeps_what_is_graded(tmp_path):
    folder, table = tmp_path / "in", tmp_path / "table.csv"
    write(folder, "a", "print('nothing')")
    write(folder, "b", f"open({str(tmp_path / 'begun')!r}, 'w').close()\nwhile True: pass", STUB)
    command = [sys.executable, "-m", "ranklab.cli", "grade", str(folder), "--csv", str(table)]
    (tmp_path / "scratch").mkdir()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "TMPDIR": str(tmp_path / "scratch")})
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err
    assert err.strip() == "stopped: 1 of 2 are graded"
    assert "a.ipynb" in table.read_text() and "b.ipynb" not in table.read_text()
    assert left_over(tmp_path) == [] and list((tmp_path / "scratch").iterdir()) == []
