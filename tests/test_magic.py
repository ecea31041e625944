"""The cell magic `%%ranks`, in a real kernel, and called as IPython calls it."""

import pytest
from engine_tools import Notebook

pytestmark = pytest.mark.timeout(120)
PREPARE = """
import threading, torch, torch.distributed as dist
scale, lock = 10, threading.Lock()

def total(x):
    x = torch.tensor(float(x))
    dist.all_reduce(x)
    return x.item() * scale

class Point:
    pass

point = Point()
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    book = Notebook(tmp_path_factory.mktemp("notebook"))
    book.wait_until_ready()
    assert book.run(PREPARE) == book.run("%load_ext ranklab") == ""
    yield book
    book.close()


def headed(*outputs):
    return "".join(f"--- rank {rank} ---\n{text}\n" for rank, text in enumerate(outputs))


def test_output_and_last_value_stand_under_a_heading_for_each_rank(notebook):
    cell = "%%ranks 4\nprint('here is', dist.get_rank())\ntotal(dist.get_rank())"
    assert notebook.run(cell) == headed(*(f"here is {rank}\n60.0" for rank in range(4)))
    assert notebook.run("%%ranks 3\nif dist.get_rank() == 1:\n    print('hi')") == (
        "--- rank 1 ---\nhi\n")
    shown = notebook.run("%%ranks 2 --stream\nprint('hi')").splitlines()
    assert sorted(shown) == ["[rank 0] hi", "[rank 1] hi"]


def test_names_of_the_notebook_go_there_and_none_comes_back(notebook):
    cell = ("%%ranks 2\nfrom statistics import *\nn: int = mean([2, 2])"
            "\nscale = 3\ntotal(n), type(point) is Point")
    assert notebook.run(cell) == headed(*["(12.0, True)"] * 2)  # total() sees the new scale
    assert notebook.run("scale, 'n' in globals()") == "(10, False)"
    assert notebook.run("%%ranks 2\nwith open('/dev/null') as file:\n    pass\nfile.closed") == (
        headed("True", "True"))  # IPython's own open stays at home


def test_the_last_values_come_back_where_that_is_asked(notebook):
    shown = notebook.run("%%ranks 2 --to got\n{'rank': dist.get_rank(), 'x': torch.ones(1)}")
    assert shown == headed(*(f"{{'rank': {rank}, 'x': tensor([1.])}}" for rank in range(2)))
    assert notebook.run("[(value['rank'], value['x'].item()) for value in got]") == (
        "[(0, 1.0), (1, 1.0)]")


def test_an_error_and_a_hang_point_at_the_line_of_the_cell(notebook):
    number = int(notebook.run("len(In)"))
    cell = ("%%ranks 2\nrank = dist.get_rank()\n"
            "def inverse():\n    return 1 / rank  # here\ninverse()")
    shown = notebook.run(cell)
    assert "--- rank 1 ---\n1.0\nRankError: rank 0 of 2 raised ZeroDivisionError" in shown
    assert (f"Cell In[{number}], line 5, in <module>\n      inverse()\n"
            f"  Cell In[{number}], line 4, in inverse\n      return 1 / rank  # here") in shown
    assert "run_cell_magic" not in shown and "magic.py" not in shown
    shown = notebook.run("%%ranks 2 --timeout 1\nif dist.get_rank() == 0:\n    dist.barrier()")
    assert f"waits in barrier at Cell In[{number + 1}], line 3, in <module>:  dist.barr" in shown
    shown = notebook.run("%%ranks 2\n1 +")
    assert f"Cell In[{number + 2}], line 2\n    1 +\n" in shown and "SyntaxError" in shown


def test_a_rehearsal(notebook):
    cell = "%%ranks 2 --rehearse\nfrom ranklab import device\ntorch.ones(1, device=device())"
    assert notebook.run(cell) == headed(*["tensor([1.], device='gpu:0')"] * 2)
    assert "Expected all tensors to be on the same device" in notebook.run(
        cell + " + torch.ones(1)")


def test_what_cant_be_is_one_sentence():
    """By run_cell_magic, in a shell of this process."""
    from IPython.core.error import UsageError
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.history_manager.enabled = False
    shell.run_cell("%load_ext ranklab")
    shell.push({"lock": __import__("threading").Lock()})
    for line, cell, says in (("two", "1", "invalid int value: 'two'"), ("2", "", "body is empty"),
                             ("0", "1", "ranks must be a whole number above 0, got 0"),
                             ("2", "lock", "lock can't be sent to the ranks: cannot pickle")):
        with pytest.raises(UsageError, match=says):
            shell.run_cell_magic("ranks", line, cell)
    shell.run_cell_magic("ranks", "1 --to got", "import os\nos.environ['WORLD_SIZE']")
    assert shell.user_ns["got"] == ["1"]
    assert "--rehearse" in shell.find_cell_magic("ranks").__doc__
