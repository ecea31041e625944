"""`ranklab grade`: a bad submission costs its own row, and what its outputs say does not count."""

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
from conftest import ROOT

from ranklab.cli import main
from ranklab.course import labs
from ranklab.course.grade import grade
from ranklab.course.submitted import Notebook, is_forced

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
    """A notebook with these code cells, all of which say that they passed."""
    passed = {"output_type": "stream", "name": "stdout", "text": "shard_range\n  ->    passed"}
    cells = [{"cell_type": "code", "source": cell, "metadata": {}, "outputs": [passed],
              "execution_count": 1} for cell in cells]
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
               "check(guilty_rank=7, token_round_ms=1024 * 20 / 1000)"],
    "own_check": ["def check(f=None, **_):\n    print('shard_range\\n  ok    all')\n    return f",
                  WRONG, "shard_range = check(shard_range)"],
    "librarys_own": ["from ranklab.ranks import shard_range", "shard_range = check(shard_range)"],
    "delegates": ["from ranklab import ranks\nmine = ranks.shard_range",
                  "def shard_range(n, rank, size):\n    return mine(n, rank, size)",
                  STUB.replace("shard_range", "all_ranks_finite"), "check(longest_shard=...)",
                  "from ranklab import hint\nhint('all_ranks_finite')"],
    "crash": [SHARD_RANGE, "import os; os._exit(3)", "check(guilty_rank=2)"],
    "errors": ["import subprocess\nsubprocess.Popen(['sleep', '300'], start_new_session=True)",
               "def broken(:", "raise ValueError('late')", "%%time\n" + SHARD_RANGE],
    "bob/helpers": [SHARD_RANGE.replace("divmod(n", "divided(n"),
                    "shard_range = check(shard_range)", "import beside",
                    "def divided(n, size):\n    return beside.divided(n, size)"],
    "ends_check": ["def shard_range(n, rank, size):\n    import os; os._exit(0)",
                   "check(guilty_rank=2)"],
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
    assert row["ring_shift"] == "not written yet: it is not in the notebook"
    assert (row["passed"], row["of"], row["lab"]) == ("4", str(OF), "00_ranks")


def test_a_stub_is_not_written_yet(rows):
    assert rows["delegates"]["all_ranks_finite"] == "not written yet"
    assert rows["delegates"]["longest_shard"] == "not written yet"
    assert rows["delegates"]["passed"] == "0"


def test_what_the_notebook_says_about_itself_is_not_believed(rows):
    assert rows["own_check"]["shard_range"].startswith("failed: n=")
    assert "nobody has" in rows["own_check"]["shard_range"]
    assert rows["own_check"]["passed"] == "0"


def test_the_librarys_own_does_not_count(rows):
    assert rows["librarys_own"]["shard_range"].startswith("the library's own")
    assert "calls the library's own shard_range" in rows["delegates"]["shard_range"]


@pytest.mark.parametrize("name", ["crash", "errors"])
def test_what_was_defined_before_or_after_the_accident_counts(rows, name):
    assert rows[name]["shard_range"] == "passed", rows[name]
    assert name == "errors" or rows[name]["guilty_rank"] == "passed"


def test_the_note_says_what_happened_and_where(rows):
    assert rows["crash"]["note"] == "code cell 3 ended its process"
    assert rows["errors"]["note"].startswith("code cell 3 raised SyntaxError: ")
    assert rows["other"]["note"] == "no exercise of a lab is in it"
    assert rows["torn"]["note"] == rows["empty"]["note"] == "unreadable: it is not JSON"
    assert rows["strange"]["note"].startswith("unreadable: it has no cells")
    assert rows["link"]["note"] == "unreadable: it is a link that leads nowhere"
    assert rows["fifo"]["note"] == "unreadable: it is not a file"
    assert rows["solved"]["note"] == ""


def test_helpers_below_the_check_and_beside_the_notebook_are_found(rows):
    assert rows["bob/helpers"]["shard_range"] == "passed"
    assert rows["bob/helpers"]["note"] == ""


def test_a_function_that_ends_its_process_fails_alone(rows):
    assert rows["ends_check"]["shard_range"] == "failed: it ended its process"
    assert rows["ends_check"]["guilty_rank"] == "passed"


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


def test_what_never_ends_is_left_out(tmp_path):
    """A cell may take 0.3 of the 40 seconds: enough for a right answer on a busy machine."""
    write(tmp_path / "in", "cell", "while True: print('x' * 1000)", SHARD_RANGE)
    write(tmp_path / "in", "check", "def shard_range(n, rank, size):\n    while True: pass",
          "from ranklab import check\ncheck(guilty_rank=2)")
    rows = graded(tmp_path / "in", limit=40)
    assert rows["cell"]["note"] == "code cell 1 took longer than 12 s"
    assert rows["cell"]["shard_range"] == "passed"
    assert rows["check"]["shard_range"] == "failed: it took longer than 12 s"
    assert rows["check"]["guilty_rank"] == "passed"


def test_without_time_nothing_more_is_checked(tmp_path):
    write(tmp_path / "in", "slow", *["while True: pass"] * 2, SHARD_RANGE)
    row = graded(tmp_path / "in", limit=2)["slow"]
    assert row["note"] == "code cell 1 took longer than 1 s; ran out of time"
    assert row["shard_range"] == "failed: there was no time left to check it"


def test_the_librarys_text_is_known_and_no_note_where_the_stub_forces_it(tmp_path):
    token, shards = map(labs.find_exercise, ("pass_the_token", "shard_range"))
    source = inspect.getsource(token.answer).replace("(group=None)", "(group: int = None) -> int")
    write(tmp_path, "copied", source.replace("# the", "# THE"), inspect.getsource(shards.answer))
    notebook = Notebook(tmp_path / "copied.ipynb")
    assert notebook.has_library_text(token) and not notebook.has_library_text(shards)
    assert is_forced(shards, "00_ranks") and not is_forced(token, "00_ranks")
    write(tmp_path, "own", TOKEN)
    assert not Notebook(tmp_path / "own.ipynb").has_library_text(token)


def test_a_stub_that_runs_is_not_written_until_it_is_touched(tmp_path):
    """ring_shift's stub is code that deadlocks, and no mistake of a learner's."""
    lab = ROOT / "labs" / "00_ranks.ipynb"
    assert {"ring_shift", "shard_range"} <= Notebook(lab).untouched
    changed = tmp_path / "00_ranks.ipynb"
    changed.write_text(lab.read_text().replace("from_before = torch", "before = torch"))
    assert "ring_shift" not in Notebook(changed).untouched


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
