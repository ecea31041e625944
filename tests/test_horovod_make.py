"""`make horovod`: what it does only once, and one sentence for each way to fail. Builds nothing."""

import subprocess
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


@pytest.mark.parametrize("is_good", [False, True])
def test_a_wheel_is_built_once_and_a_failed_build_names_the_first_error(folder, capsys, monkeypatch,
                                                                        is_good):
    source, asked = folder / f"horovod-{script.VERSION}", []
    (source / "dist").mkdir(parents=True)
    (source / "setup.py").write_text(
        "import pathlib, sys\nprint('[ 50%] Building')\nprint('a.cc:3: error: no such')\n"
        f"pathlib.Path('dist/horovod-1-any.whl').write_text('')\nsys.exit({int(not is_good)})\n")
    monkeypatch.setattr(script, "check_tools", lambda: None)
    monkeypatch.setattr(script, "pip", lambda *arguments, failed: asked.append(arguments[0]))
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess(
        [], 0, stdout="", stderr=""))  # it would load
    assert script.main() == int(not is_good)
    said = capsys.readouterr()
    assert "minutes on two cores, once" in said.out and " 50% compiled" in said.out
    if not is_good:
        assert "Building Horovod stopped: a.cc:3: error: no such (all" in said.err
        return
    (source / "setup.py").unlink()  # it is not needed again
    assert script.main() == 0
    assert "building" not in capsys.readouterr().out and asked == ["install", "install"]
