"""Ranks get ranklab's modules from the process that forks them, and never an older one."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import ROOT

import ranklab
from ranklab import launch
from ranklab.engine.forkserver import MODULES, fork_server
from ranklab.engine.modules import Modules

LARGE = "hybrid", "checks.hybrid", "checks.collectives", "data"
EDITED = """
from pathlib import Path
import ranklab
from ranklab import launch

def price():
    from ranklab import ranks
    return getattr(ranks, "price", None)

if __name__ == "__main__":
    file = Path(ranklab.__file__).with_name("ranks.py")
    found = launch(price, ranks=1) + launch(price, ranks=1)
    for text in ("price = 1", "price = 22", "raise ImportError('half an edit')", "price = 333"):
        file.write_text(text)
        try:
            found += launch(price, ranks=1)
        except RuntimeError as error:
            found.append("half an edit" in str(error))
    print(found)
"""


def loaded(name, then=()):
    """Return whether ranklab.<name> is there, then import others. The call names none of them."""
    was_there = f"ranklab.{name}" in sys.modules
    for each in then:
        importlib.import_module(f"ranklab.{each}")
    return was_there


def test_what_ranks_import_is_there_in_the_next_launch():
    name = "baseline.fragmentation"
    fork_server().close()  # a fresh one: tests of another file may have wanted the same
    MODULES.clear()
    assert launch(loaded, name, (name,), ranks=2) == [False, False]
    assert launch(loaded, name, ranks=2) == [True, True]
    assert launch(loaded, "plots.style", ("plots.style",), ranks=1) == [False]
    assert launch(loaded, "plots.style", ranks=1) == [False], "it has matplotlib"


def test_what_a_call_names_no_rank_imports():
    from ranklab.plots import style
    from ranklab.zero.stages import ZeroStage2

    fork_server().close()
    MODULES.clear()
    launch(lambda: print(ZeroStage2, style), ranks=1)
    assert "ranklab.zero.stages" not in MODULES, "a rank would have told of it"
    assert launch(loaded, "zero.stages", ranks=1) == [True]
    assert launch(loaded, "plots.style", ranks=1) == [False], "it has matplotlib"


def test_a_rank_that_raises_tells_too_what_it_has_imported():
    name = "baseline.streams"

    def fail():
        importlib.import_module(f"ranklab.{name}")
        raise KeyError

    with pytest.raises(RuntimeError):
        launch(fail, ranks=1)
    assert launch(loaded, name, ranks=1) == [True]


def test_the_server_keeps_one_thread():
    launch(loaded, LARGE[0], LARGE, ranks=1)
    assert launch(loaded, LARGE[0], ranks=1) == [True]
    assert psutil.Process(fork_server()._process.pid).num_threads() == 1


def test_an_edit_is_seen_by_whoever_imports_the_module(tmp_path, monkeypatch):
    monkeypatch.setattr(ranklab, "__path__", [*ranklab.__path__, str(tmp_path)])
    file, name, user = tmp_path / "made_here.py", "ranklab.made_here", "ranklab.made_by"
    (tmp_path / "made_by.py").write_text("from ranklab.made_here import value")
    modules = Modules()
    for text, found in (("value = 1", 1), ("value = 22", 22), ("value =", None), ("value = 3", 3)):
        file.write_text(text)
        modules.need([name, user])
        assert getattr(sys.modules.get(user), "value", None) == found
        assert getattr(getattr(ranklab, "made_here", None), "value", None) == found
    file.unlink()
    modules.need([])
    assert not {name, user} & sys.modules.keys()


@pytest.mark.slow
def test_an_edit_of_the_library_is_seen_by_the_next_launch(tmp_path):
    shutil.copytree(ROOT / "lib" / "ranklab", tmp_path / "ranklab")
    Path(tmp_path / "edits.py").write_text(EDITED)
    done = subprocess.run([sys.executable, "edits.py"], cwd=tmp_path, capture_output=True,
                          text=True, timeout=120, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.stdout == "[None, None, 1, 22, True, 333]\n", done.stderr
