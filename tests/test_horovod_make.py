"""`make horovod`: one sentence for each way to fail. Builds nothing."""

import sys

import pytest
from conftest import load_script

script = load_script("horovod")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """build/horovod is a fresh folder, and MPI is not here."""
    monkeypatch.setattr(script, "PLACE", tmp_path)
    monkeypatch.setattr(script, "has_mpi", lambda: False)
    return tmp_path


@pytest.mark.parametrize("what, sentence", [
    ("g++", "g++ is missing: install a C++ compiler (Debian, Ubuntu: `apt install g++`)"),
    ("Python.h", f"install Python's headers (Debian, Ubuntu: `apt install python3."
     f"{sys.version_info[1]}-dev`)"),
    ("Linux", "is built on Linux only; ranklab.horovod runs everywhere")])
def test_what_is_missing_is_a_sentence(monkeypatch, capsys, folder, what, sentence):
    monkeypatch.setattr(script.shutil, "which", lambda name: None if what == "g++" else name)
    monkeypatch.setattr(script.sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.setattr(script.sys, "platform", "darwin" if what == "Linux" else "linux")
    assert script.main() == 1
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said


def test_a_failed_build_names_the_first_error(folder, capsys, monkeypatch):
    source = folder / f"horovod-{script.VERSION}"
    source.mkdir()
    (source / "setup.py").write_text(
        "print('[ 50%] Building')\nprint('a.cc:3: error: no such')\nexit(1)\n")
    monkeypatch.setattr(script, "check_tools", lambda: None)
    monkeypatch.setattr(script, "find_cmake", lambda: "cmake")
    assert script.main() == 1
    said = capsys.readouterr()
    assert "minutes on two cores, once" in said.out and " 50% compiled" in said.out
    assert "Building Horovod stopped: a.cc:3: error: no such (all" in said.err
