"""`make horovod`: what it does only once, and one sentence for each way to fail. Builds nothing."""

import subprocess
import sys

import pytest
from conftest import load_script

script = load_script("horovod")


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """build/horovod is a fresh folder, and MPI is not here."""
    monkeypatch.setattr(script, "PLACE", tmp_path)
    monkeypatch.setattr(script, "has_mpi", lambda: False)
    return tmp_path


def test_what_is_missing_is_a_sentence(monkeypatch, capsys, tmp_path):
    def fails(sentence, call=script.main):
        assert call() == 1
        said = capsys.readouterr().err
        assert sentence in said and "Traceback" not in said

    monkeypatch.setattr(script.shutil, "which", lambda name: name)
    monkeypatch.setattr(script.sysconfig, "get_path", lambda name: str(tmp_path))
    fails(f"Python.h is missing: install Python's headers (Debian, Ubuntu: `apt install "
          f"python3.{sys.version_info[1]}-dev`)")
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    fails("g++ is missing: install a C++ compiler (Debian, Ubuntu: `apt install g++`)")
    monkeypatch.setattr(script.sys, "platform", "darwin")
    fails("is built on Linux only; ranklab.horovod runs everywhere")
    monkeypatch.setattr(script.subprocess, "call", lambda *_, **__: 1)  # no network
    for sentence, call in (("cmake is missing, and pip could not bring it", script.find_cmake),
                           ("source could not be fetched: check the network", script.source)):
        with pytest.raises(script.Stop, match=sentence):
            call()


def fake_source(place, monkeypatch, lines, good):
    """A source whose setup.py prints `lines` and, where it is good, makes a wheel."""
    monkeypatch.setattr(script, "check_tools", lambda: None)
    folder = place / f"horovod-{script.VERSION}"
    folder.mkdir()
    (folder / "setup.py").write_text(
        f"import os, pathlib, sys\nprint({chr(10).join(lines)!r})\n"
        "pathlib.Path('flags').write_text(os.environ['MAKEFLAGS'] + os.environ['CXX'])\n"
        f"pathlib.Path('dist').mkdir(exist_ok=True)\n{good} and "
        "pathlib.Path('dist/horovod-1-any.whl').write_text('')\n"
        f"sys.exit({int(not good)})\n")
    return folder


def test_a_failed_build_names_the_first_error(place, monkeypatch, capsys):
    fake_source(place, monkeypatch, ["a.cc:3: error: no such", "b.cc:4: error: another"], False)
    assert script.main() == 1
    assert "Building Horovod stopped: a.cc:3: error: no such (all" in capsys.readouterr().err
    assert "another" in (place / "build.log").read_text()


def test_a_wheel_is_built_once_and_installed_each_time(place, capsys, monkeypatch):
    source, asked = fake_source(place, monkeypatch, ["[ 50%] Building"], True), []
    monkeypatch.setattr(script, "pip", lambda *arguments, failed: asked.append(arguments[0]))
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess(
        [], 0, stdout="", stderr=""))  # it would load
    assert script.main() == 0
    said = capsys.readouterr().out
    assert "minutes on two cores, once" in said and " 50% compiled" in said
    assert (source / "flags").read_text() == f"-j{script.JOBS}{place / 'cxx20'}"
    (source / "setup.py").unlink()  # it is not needed again
    assert script.main() == 0
    assert "building" not in capsys.readouterr().out and asked == ["install", "install"]
