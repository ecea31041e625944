"""launch from cells of real kernels: names of cells, errors, interrupts, and no process left."""

import signal
import time

import psutil
import pytest
from engine_tools import Notebook, alive, eventually

from ranklab.engine.surroundings import patience

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Two notebooks that have launched once. The first is the one most tests write cells in."""
    books = [Notebook(tmp_path_factory.mktemp("notebook")) for _ in range(2)]
    for book in books:
        book.wait_until_ready()
    first_cell = "import os, time, torch, torch.distributed as dist\nfrom ranklab import launch\n"
    cells = [book.begin(first_cell + "launch(dist.get_rank, ranks=2)") for book in books]
    assert [b.end(c, 90) for b, c in zip(books, cells, strict=True)] == ["[0, 1]"] * 2
    yield books
    for book in books:
        book.close()


@pytest.fixture
def notebook(kernels):
    return kernels[0]


def only_the_kernel_and_its_server(notebook):
    return eventually(lambda: len(alive(notebook.mark)) == 2, 3)


def test_functions_lambdas_closures_classes_and_globals_of_cells(notebook):
    notebook.run("scale = 10\n"
                 "def total(x):\n"
                 "    x = torch.tensor(float(x)); dist.all_reduce(x); return x.item() * scale\n"
                 "class Point:\n"
                 "    def __init__(self, x): self.x = x\n"
                 "    def moved(self): return Point(total(self.x))\n"
                 "def add(n): return lambda: n + dist.get_rank()")
    assert notebook.run("launch(total, 1, ranks=2)") == "[20.0, 20.0]"
    assert notebook.run("launch(lambda: total(2), ranks=2)") == "[40.0, 40.0]"
    assert notebook.run("launch(add(5), ranks=2)") == "[5, 6]"
    assert notebook.run("points = launch(Point(3).moved, ranks=2)\n"
                        "[(type(p) is Point, p.x) for p in points]") == (
        "[(True, 60.0), (True, 60.0)]")
    notebook.run("scale = 100")  # the launch sees a changed global
    assert notebook.run("launch(total, 1, ranks=2)") == "[200.0, 200.0]"


def test_output_of_ranks_appears_in_the_cell(notebook):
    assert notebook.run("_ = launch(lambda: print('hello from', dist.get_rank()), ranks=2)") == (
        "[rank 0] hello from 0\n[rank 1] hello from 1\n")


def test_environment_of_a_later_cell(notebook):
    notebook.run("os.environ['SET_IN_A_CELL'] = 'yes'")
    assert notebook.run("launch(os.environ.get, 'SET_IN_A_CELL', ranks=2)") == "['yes', 'yes']"


def test_launch_in_an_srun_allocation_is_not_taken_for_a_rank(notebook):
    notebook.run("os.environ |= {'SLURM_PROCID': '0', 'SLURM_NTASKS': '8',\n"
                 "               'SLURM_STEP_NUM_TASKS': '8', 'SLURM_STEP_ID': '0'}")
    assert notebook.run("launch(dist.get_rank, ranks=2)") == "[0, 1]"


def test_an_error_shows_the_line_of_the_cell_and_no_engine(notebook):
    notebook.run("def inner(x):\n"
                 "    return 1 / x          # the culprit\n"
                 "def outer():\n"
                 "    return inner(0)")
    shown = notebook.run("# the call\nlaunch(outer, ranks=2)")
    assert "rank 0 of 2 raised ZeroDivisionError: division by zero" in shown
    assert "in inner\n      return 1 / x          # the culprit" in shown
    assert shown.count("Cell In[") >= 3 and "launch(outer, ranks=2)" in shown
    assert "engine" not in shown and "worker_group" not in shown, shown
    assert "/tmp/" not in shown and "ipykernel" not in shown, shown
    assert only_the_kernel_and_its_server(notebook)


def test_a_hang_shows_the_line_of_the_cell_and_no_engine(notebook):
    notebook.run("def skip():\n"
                 "    if dist.get_rank() == 0:\n"
                 "        dist.barrier()    # all alone")
    started = time.monotonic()
    shown = notebook.run("launch(skip, ranks=2, timeout=2)")
    assert time.monotonic() - started < 2 + 5 * patience()  # the promise
    assert "HangError" in shown and "rank 0 of 2 did not finish within 2 s" in shown
    assert "rank 0  waits in barrier at Cell In[" in shown
    assert ", line 3, in skip:  dist.barrier()    # all alone" in shown
    assert "rank 1  finished after" in shown
    assert "engine" not in shown and "worker_group" not in shown, shown
    assert only_the_kernel_and_its_server(notebook)


def test_an_interrupt_ends_the_ranks(notebook):
    cell = notebook.begin("def wait_for_ever():\n"
                          "    print('ready')\n"
                          "    dist.recv(torch.ones(1))\n"
                          "launch(wait_for_ever, ranks=2, stream=True)")
    notebook.wait_for_output(cell, "[rank 1] ready")
    time.sleep(1)  # from its print to its recv
    notebook.manager.interrupt_kernel()
    shown = notebook.end(cell, 10)
    assert "RanksInterrupted: after" in shown
    assert "rank 1  waits in recv at Cell In[" in shown and "engine" not in shown
    assert only_the_kernel_and_its_server(notebook)
    assert notebook.run("launch(dist.get_rank, ranks=2)") == "[0, 1]"


def test_two_notebooks_at_once(kernels):
    code = ("def name(me):\n"
            "    names = [None] * 3; dist.all_gather_object(names, me); return names\n"
            "all(launch(name, {0}, ranks=3) == [[{0}] * 3] * 3 for _ in range(3))")
    cells = [(book, book.begin(code.format(i))) for i, book in enumerate(kernels)]
    assert [book.end(cell) for book, cell in cells] == ["True", "True"]


def test_nothing_is_left_when_the_kernel_is_killed(kernels):
    """SIGKILL, to the kernel's pid alone: one has ranks that wait, the other an endless loop."""
    waiting, looping = kernels
    cells = [
        waiting.begin("def wait():\n    print('ready')\n    dist.recv(torch.ones(1))\n"
                      "launch(wait, ranks=3, stream=True)"),
        looping.begin("def loop():\n    print('ready')\n"
                      "    while dist.get_rank() == 0: pass\n"
                      "    dist.barrier()\n"
                      "launch(loop, ranks=3, stream=True)")]
    for book, cell in zip(kernels, cells, strict=True):
        book.wait_for_output(cell, "ready")
        assert len(alive(book.mark)) == 5  # kernel, server, three ranks
    for book in kernels:
        psutil.Process(book.pid).send_signal(signal.SIGKILL)
        assert eventually(lambda book=book: not alive(book.mark), 3), alive(book.mark)
