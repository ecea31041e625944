"""`make horovod`: what it does only once, and one sentence for each way to fail. Builds nothing."""

import subprocess
import sys

import pytest
from conftest import load_script

script = load_script("horovod")


@pytest.fixture
def place(monkeypatch, tmp_path):
    """build/horovod in a fresh folder; (the folder, what pip was asked to do)."""
    asked = []
    monkeypatch.setattr(script, "PLACE", tmp_path)
    monkeypatch.setattr(script, "pip", lambda *arguments, failed: asked.append(arguments[0]))
    return tmp_path, asked


def missing(monkeypatch, *names):
    real = script.shutil.which
    monkeypatch.setattr(script.shutil, "which", lambda n: None if n in names else real(n))


def fails(capsys, sentence):
    assert script.main() == 1
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said


def test_no_compiler(place, monkeypatch, capsys):
    missing(monkeypatch, "g++")
    fails(capsys, "g++ is missing: install a C++ compiler (Debian, Ubuntu: `apt install g++`)")


def test_no_headers_of_python(place, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(script.shutil, "which", lambda name: name)
    monkeypatch.setattr(script.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(script, "has_mpi", lambda: False)
    fails(capsys, f"Python.h is missing: install Python's headers (Debian, Ubuntu: `apt install "
                  f"python3.{sys.version_info[1]}-dev`)")


def test_another_system(place, monkeypatch, capsys):
    monkeypatch.setattr(script.sys, "platform", "darwin")
    fails(capsys, "is built on Linux only; ranklab.horovod runs everywhere")


def test_no_cmake_and_no_network(monkeypatch, tmp_path):
    monkeypatch.setattr(script, "PLACE", tmp_path)
    missing(monkeypatch, "cmake")
    monkeypatch.setattr(script.subprocess, "call", lambda *_, **__: 1)
    with pytest.raises(script.Stop, match="cmake is missing, and pip could not bring it"):
        script.find_cmake()
    monkeypatch.setattr(script.subprocess, "call", lambda *_, **__: 0)
    assert script.find_cmake() == str(tmp_path / "run-cmake")


def test_no_network_for_the_source(monkeypatch, tmp_path):
    monkeypatch.setattr(script, "PLACE", tmp_path)
    monkeypatch.setattr(script.subprocess, "call", lambda *_, **__: 1)
    with pytest.raises(script.Stop, match="source could not be fetched: check the network"):
        script.source()


def test_mpi_counts_only_with_its_headers(monkeypatch, tmp_path):
    for code, found in ((0, True), (1, False)):
        (tmp_path / "mpicxx").write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / "mpicxx").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert script.has_mpi() is found
    (tmp_path / "mpicxx").unlink()
    assert script.has_mpi() is False


def fake_source(folder, lines):
    """A source whose setup.py prints `lines` and, after a good one, makes a wheel."""
    folder.mkdir()
    good = not any("error" in line for line in lines)
    (folder / "setup.py").write_text(
        f"import os, pathlib, sys\nprint({chr(10).join(lines)!r})\n"
        "pathlib.Path('flags').write_text(os.environ['MAKEFLAGS'] + os.environ['CXX'])\n"
        f"pathlib.Path('dist').mkdir(exist_ok=True)\n{good} and "
        "pathlib.Path('dist/horovod-1-any.whl').write_text('')\n"
        f"sys.exit({int(not good)})\n")


def test_a_failed_build_names_the_first_error_and_goes_on_next_time(place, capsys, monkeypatch):
    folder, _ = place
    fake_source(folder / f"horovod-{script.VERSION}", ["[ 10%] Building", "a.cc:3: error: no such",
                                                       "b.cc:4: error: another"])
    monkeypatch.setattr(script, "check_tools", lambda: None)
    fails(capsys, "Building Horovod stopped: a.cc:3: error: no such (all of it is in build/horovod")
    assert "another" in (folder / "build.log").read_text()


def test_a_wheel_is_built_once_and_installed_each_time(place, capsys, monkeypatch):
    folder, asked = place
    source = folder / f"horovod-{script.VERSION}"
    fake_source(source, [f"[ {n}%] Building" for n in range(10, 100, 3)])
    monkeypatch.setattr(script, "check_tools", lambda: None)
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess(
        [], 0, stdout="", stderr=""))  # it would load
    assert script.main() == 0
    said = capsys.readouterr().out
    assert "minutes on two cores, once" in said and said.count("% compiled") == 8
    assert (source / "flags").read_text() == f"-j{script.JOBS}{folder / 'cxx20'}"
    (source / "setup.py").unlink()  # it is not needed again
    assert script.main() == 0
    assert "building" not in capsys.readouterr().out
    assert asked == ["install", "install"]


def test_the_compiler_is_asked_for_cxx20_whatever_cmake_says(tmp_path):
    wrapper = tmp_path / "cxx20"
    script.write_script(wrapper, script.WRAPPER)
    (tmp_path / "g++").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "g++").chmod(0o755)
    done = subprocess.run([wrapper, "-std=c++14", "-g", "-O3", "a b.cc"], capture_output=True,
                          text=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert done.stdout == "-std=c++20 -O3 a b.cc\n"
