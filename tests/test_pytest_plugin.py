"""The fixture and the mark `ranks`, as pytest runs and reports them in somebody's project."""

import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT

pytestmark = pytest.mark.timeout(200)
PROJECT = """
import unittest
import pytest, torch, torch.distributed as dist
from ranklab.engine import HangError

SCALE = 10

class Box:
    def __init__(self, x):
        self.x = x

def total(x):
    x = torch.tensor(x)
    dist.all_reduce(x)
    assert x == 8, "the sum"
    return Box(x.item() * SCALE)

def is_first():
    r = dist.get_rank()
    assert [r] == [0]

def test_values_of_four_ranks(ranks):
    boxes = ranks(total, 2)
    assert all(type(box) is Box for box in boxes) and [box.x for box in boxes] == [80] * 4

def test_a_failure_can_be_expected(ranks):
    with pytest.raises(RuntimeError, match="rank 1 of 2 raised AssertionError: assert .1. == .0."):
        ranks(is_first, ranks=2)

def test_an_assert_of_a_rank_fails_it(ranks):
    ranks(is_first, ranks=2)                # this line

@pytest.mark.ranks
def test_all_of_it_on_each_rank(tmp_path):
    assert dist.get_world_size() == 4 and tmp_path.exists()
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 4

@pytest.mark.ranks(2)
@pytest.mark.parametrize("n", [1, 2])
def test_parameter(n):
    assert n * dist.get_rank() < 2

@pytest.mark.ranks(2, stall=1, timeout=30)
def test_hang():
    if dist.get_rank() == 0:
        dist.barrier()                      # alone

@pytest.mark.ranks(2)
def test_skipped_on_the_ranks():
    pytest.importorskip("nothing_of_this_name")

@pytest.mark.ranks(2)
@pytest.mark.xfail
def test_expected_to_fail():
    assert False

@pytest.mark.ranks(2)
async def test_async():
    pass

@pytest.mark.ranks(2)
def test_with_what_cant_be_sent(capsys):
    pass

@pytest.mark.ranks(0)
def test_no_ranks():
    pass

class TestInAClass:
    def three(self):
        return 3

    @pytest.mark.ranks(2)
    def test_method(self):
        assert self.three() == 3

class TestOfUnittest(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_method(self):
        pass
"""
FAILS = {"test_an_assert_of_a_rank_fails_it", "test_parameter[2]", "test_hang", "test_async",
         "test_with_what_cant_be_sent", "test_no_ranks", "TestOfUnittest::test_method"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_mine.py").write_text(PROJECT)
    return folder


def run(folder, *options):
    return subprocess.run([sys.executable, "-m", "pytest", "-p", "ranklab.pytest_plugin", "-p",
                           "no:cacheprovider", "--strict-markers", "-rA", *options],
                          cwd=folder, text=True, stdout=subprocess.PIPE, timeout=150).stdout


@pytest.fixture(scope="module")
def said(project):
    return run(project)


def test_each_test_ends_as_it_should(said):
    failed = {line.split()[1].split("::", 1)[1] for line in said.splitlines()
              if line.startswith(("FAILED test_", "ERROR test_"))}
    assert failed == FAILS
    assert "6 failed, 5 passed, 1 skipped, 1 xfailed, 1 error" in said
    assert "nothing_of_this_name" in said  # why it was skipped


@pytest.mark.sweep
def test_under_xdist_without_a_module_that_can_be_imported(project):
    shown = run(project, "-n2", "--import-mode=importlib", "-k", "values or InAClass")
    assert "2 passed" in shown and "FAILED" not in shown, shown


@pytest.mark.parametrize("text", [
    ">       ranks(is_first, ranks=2)                # this line",
    "E       ranklab.engine.report.RankError: rank 1 of 2 raised AssertionError: assert [1] == [0]",
    "E         test_mine.py, line 20, in is_first\nE             assert [r] == [0]",
    "rank 1 of 2 raised AssertionError: assert (2 * 1) < 2",
    "rank 0 of 2 waits forever: it has slept in communication for 1 s, and rank 1 has returned",
    "rank 0  waits in barrier at test_mine.py, line 48, in test_hang:  dist.barrier()",
    "the test returned a coroutine; it must return None",
    "launch: capsys can't be sent to the ranks",
    "launch: ranks must be a whole number above 0, got 0",
    "the mark `ranks` can't run a method of unittest.TestCase"])
def test_the_failure_says_why_and_where(said, text):
    assert text in said
    assert "During handling" not in said and "forkserver" not in said


def test_it_is_the_entry_point_and_brings_nothing_heavy(tmp_path):
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert entries == {"pytest11": {"ranklab.pytest_plugin": "ranklab.pytest_plugin"}}
    heavy = ("torch", "IPython", "matplotlib", "numpy", "cloudpickle")
    (tmp_path / "test_light.py").write_text(
        f"import sys\n\ndef test_light():\n    assert not set({heavy}) & sys.modules.keys()\n")
    assert "1 passed" in run(tmp_path)
