"""What a cell gets that no cell has bound: in a real kernel, and as a slice of a lab's cells."""

import ast
import builtins

import nbformat
import pytest
from conftest import ROOT
from engine_tools import Notebook

from ranklab.course import build, cells, labs, progress
from ranklab.course.check import PASSED

BEGIN = "from ranklab import begin, catch_up, check, launch, status\nbegin('00_ranks')"
MINE = """
import time
import torch.distributed as dist

LONGER = 1

def shard_range(n, rank, size):
    few, rest = divmod(n, size)
    start = few * rank + min(rank, rest)
    return range(start, start + few + (rank < rest) * LONGER)
"""


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """Starts kernels with one home, one after the other, on a copy of lab 00."""
    monkeypatch.setenv("RANKLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "my lab.ipynb"))
    nbformat.write(build.lab_notebook(ROOT, "00_ranks"), tmp_path / "my lab.ipynb")
    books = []

    def start():
        for book in books:
            book.close()
        books.append(Notebook(tmp_path))
        books[-1].wait_until_ready()
        return books[-1]

    yield start
    books[-1].close()


def shown(book, call):
    """The two forms of what `call` displays."""
    said = book.run("from IPython.utils.capture import capture_output\n"
                    f"with capture_output() as seen:\n    {call}\nseen.outputs[0].data")
    found = eval(said)
    return found["text/plain"], found["text/markdown"]


@pytest.mark.timeout(200)
def test_a_cell_gets_what_was_skipped_and_a_restart_loses_nothing(kernels):
    book = kernels()
    assert book.run(BEGIN) == ""
    assert book.run("shard_range(5, 0, 2)") == "The library's: shard_range.\nrange(0, 3)"
    assert book.run("who_knows").endswith("NameError: name 'who_knows' is not defined")
    book.run("def all_ranks_finite(loss, group=None):\n"
             "    raise NotImplementedError('exercise 4.4')")
    assert book.run("all_ranks_finite.__module__") == (
        "The library's: all_ranks_finite.\n'ranklab.ranks'")
    assert book.run(MINE + "shard_range = check(shard_range)") == ""
    assert progress.load()["shard_range"]["state"] == PASSED
    assert shown(book, "status()")[1].count("| passed |") == 1

    book = kernels()
    assert book.run(BEGIN).startswith("1 of ")
    plain, linked = shown(book, "catch_up('4.4')")
    assert plain == ("Yours, as you passed it: shard_range. The library's: ring_shift. "
                     "From the cells above: dist, documents, loss_of. Go on at 4.4 Decide together")
    assert linked.endswith("Go on at [4.4 Decide together](<#4.4-Decide-together>)")
    assert book.run("LONGER, shard_range.__module__, documents[11], shard_range(5, 1, 2)") == (
        "(1, '__main__', '', range(3, 5))")
    assert "No heading" in book.run("catch_up('9.9')")


def test_catch_up_goes_on_after_the_last_that_passed(kernels):
    for name in ("shard_range", "all_ranks_finite"):  # as older versions recorded it, without text
        progress.record(name, PASSED)
    book = kernels()
    book.run(BEGIN)
    plain, _ = shown(book, "catch_up()")
    assert plain.startswith("The library's: all_ranks_finite, ring_shift, shard_range.")
    assert plain.endswith("Go on at pass_the_token")
    assert book.run("%%ranks 2\nimport torch.distributed as d\nall_ranks_finite(loss_of('a'))"
                    ).count("True") == 2


def test_elsewhere_begin_does_nothing(capsys):
    from ranklab import begin, catch_up, status

    begin("00_ranks")
    catch_up()
    status("00")
    assert "Run the first cell" in capsys.readouterr().out


@pytest.mark.timeout(100)
def test_what_another_cell_has_bound_since_is_bound_again_for_those_below(tmp_path, kernels):
    cells = [BEGIN, "found = [1]", "one = found[0]", "found = [2]", "two = found[0]", "one, two"]
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    notebook.metadata["ranklab"] = {"stem": "00_ranks"}
    nbformat.write(notebook, tmp_path / "my lab.ipynb")
    book = kernels()
    book.run(cells[0])
    book.run(cells[3])
    assert book.run(cells[5]) == "From the cells above: one, two.\n(1, 2)"
    assert book.run("found") == "[2]"
    book = kernels()
    book.run(cells[0])
    book.run(cells[1])
    assert book.run(cells[4]) == "From the cells above: found.\n"
    assert book.run("two") == "2" and book.run("found = [3]") == book.run(cells[4]) == ""
    assert book.run("two") == "3"


@pytest.mark.parametrize("stem", labs.written())
def test_every_lab_begins(stem):
    first = next(cell for cell in build.lab_notebook(ROOT, stem).cells if cell.cell_type == "code")
    assert f'\nbegin("{stem}")' in first.source


# --- slices -------------------------------------------------------------------------------------

@pytest.mark.parametrize("source, names", [
    ("y = x", "x"), ("x = 1\ny = x", ""), ("x += 1", "x"), ("x = x + 1", "x"),
    ("def f():\n    return later\nlater = 1", ""), ("def f():\n    return g()", "g"),
    ("for i in rows:\n    print(i)", "rows print"), ("x = check(x)", "check x"),
    ("%time x = y", ""), ("%%ranks 4 --to found\nprint(x)", "print x"), ("x = = 1", ""),
])
def test_needs(source, names):
    assert cells.needs(cells.statements_of(source)) == set(names.split())


LAB = [
    "import os, math",
    "documents = [1]\ndocuments[0] = 2\nother = 3",
    "def loss():\n    return scale * len(documents)",
    "scale = math.pi\nprint(loss())",
    "rows = []\nfor i in range(3):\n    rows.append(i)",
    "rows = rows + [4]\nother += 1",
]


@pytest.mark.parametrize("names, kept", [
    ("loss", ["import os, math", "documents = [1]", "documents[0] = 2", "def loss", "scale = "]),
    ("rows", ["rows = []", "for i in", "rows = rows"]),
    ("other", ["other = 3", "other += 1"]),
    ("os", ["import os"]), ("nothing", []),
])
def test_a_slice_has_what_binds_and_what_changes(names, kept):
    statements = [one for cell in LAB for one in cells.statements_of(cell)]
    found = cells.to_bind(set(names.split()), statements, lambda name, _: name in dir(builtins))
    found = [ast.unparse(one.node) for one in found]
    assert len(found) == len(kept) and all(map(str.startswith, found, kept)), found


def test_a_comment_in_a_job_file_is_no_heading():
    assert cells.headings("## A `b`\n```bash\n# no\n```\n### C") == [(2, "A `b`"), (3, "C")]
