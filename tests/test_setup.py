"""The set-up: `make lab` in a fresh clone, second runs, and a clear sentence for each way to fail."""

import ast
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
import yaml
from conftest import ROOT, load_script
from packaging.requirements import Requirement

setup = load_script("setup")


def pins():
    """{package: version} of constraints.txt, names in pip's normal form."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normal(name): version for name, version in found}


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def run_make(checkout, *arguments, **environ):
    """`make ...` in the fresh clone, with a HOME that is empty."""
    home = checkout.parent / "home"
    home.mkdir(exist_ok=True)
    return subprocess.run(["make", *arguments], cwd=checkout, text=True, timeout=100,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT,
                          env={**os.environ, "HOME": str(home), **environ})


# --- the pins ---------------------------------------------------------------------------------

def test_every_requirement_is_pinned_inside_its_range():
    for text in importlib.metadata.requires("ranklab"):
        wanted = Requirement(text)
        assert normal(wanted.name) in pins(), f"{wanted.name} is not in constraints.txt"
        assert wanted.specifier.contains(pins()[normal(wanted.name)]), text


def test_pins_are_what_is_installed():
    here = {normal(d.name): d.version.partition("+")[0] for d in importlib.metadata.distributions()}
    assert pins()["torch"] == here["torch"]
    wrong = {name: (here[name], pin) for name, pin in pins().items() if here.get(name, pin) != pin}
    assert not wrong, "installed, pinned"
    # NVIDIA's packages and triton come with torch's CUDA wheels, in the versions that it names.
    extra = [name for name in here if name not in pins() and name not in ("pip", "ranklab")
             and not name.startswith(("nvidia-", "cuda-", "triton"))]
    assert not extra, "installed by somebody, but not pinned"


def test_pins_name_no_place_and_no_platform():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[\w.-]+==[\w.]+", line), line
    assert not [name for name in pins() if name.startswith("nvidia-")]


def test_conda_gets_the_same_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [item for item in environment["dependencies"] if isinstance(item, str)]
    pip = next(item["pip"] for item in environment["dependencies"] if isinstance(item, dict))
    assert pip == ["--constraint constraints.txt", f"--editable .[{setup.EXTRAS}]"]
    python = next(item for item in conda if item.startswith("python="))
    assert python == "python=3.%d" % setup.OLDEST[1]


def test_condas_pip_lines_are_satisfied_here(checkout):
    environment = yaml.safe_load((checkout / "environment.yml").read_text())
    lines = next(item["pip"] for item in environment["dependencies"] if isinstance(item, dict))
    (checkout / "conda-would-write.txt").write_text("\n".join(lines))
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--dry-run", "--no-index",
                           "--no-build-isolation", "-r", "conda-would-write.txt"], cwd=checkout,
                          capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Would install ranklab" in done.stdout or "Would install" not in done.stdout


# --- make -------------------------------------------------------------------------------------

def test_second_run_only_looks_at_the_stamp(checkout):
    done = run_make(checkout, "setup")
    assert (done.returncode, done.stdout) == (0, "")


def test_help_lists_every_command(checkout):
    rules = re.findall(r"^([a-z]+):", (checkout / "Makefile").read_text(), re.M)
    done = run_make(checkout)
    for rule in set(rules) - {"setup"}:
        assert f"make {rule} " in done.stdout, rule


def test_make_lab_serves_the_labs_at_the_printed_address(checkout):
    home = checkout.parent / "home"
    home.mkdir(exist_ok=True)
    environ = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY")}
    with subprocess.Popen(["make", "lab", "PORT=0"], cwd=checkout, text=True,
                          env={**environ, "HOME": str(home)}, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          start_new_session=True) as server:
        try:
            seen = []
            for line in server.stdout:
                seen.append(line)
                if address := re.search(r"http://127\.0\.0\.1:\d+/lab\S*token=\w+", line):
                    break
            else:
                pytest.fail("no address was printed:\n" + "".join(seen))
            assert "/lab/tree/labs?" in address[0]
            with urllib.request.urlopen(address[0], timeout=30) as page:
                assert page.status == 200 and b"JupyterLab" in page.read()
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.communicate(timeout=30)


def test_no_python_is_a_sentence(checkout):
    done = run_make(checkout, "setup", "PYTHON=")
    assert done.returncode and "install Python 3.11 or newer" in done.stdout


def test_ci_runs_make_test_and_never_fails_on_debian_packages(checkout, tmp_path):
    called = tmp_path / "called"
    for name, script in {"make": f"echo $* >> {called}", "apt-get": "exit 1", "id": "echo 0",
                         "timeout": 'shift; exec "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    done = subprocess.run(["/bin/bash", checkout / ".ci" / "run"], capture_output=True, text=True,
                          env={"PATH": str(tmp_path), "CI": "true"}, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "going on without" in done.stdout
    assert called.read_text() == "test\n"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


# --- each way to fail -------------------------------------------------------------------------

def test_an_old_python_can_read_the_script():
    ast.parse((ROOT / "scripts" / "setup.py").read_text(), feature_version=(3, 6))


def test_windows_is_sent_to_wsl(monkeypatch, capsys):
    monkeypatch.setattr(setup.sys, "platform", "win32")
    assert setup.main([]) == 1
    assert "wsl --install" in capsys.readouterr().err


def test_old_python_without_a_newer_one(monkeypatch):
    monkeypatch.setattr(setup.sys, "version_info", (3, 9, 2, "final", 0))
    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    with pytest.raises(setup.Stop, match="too old: ranklab needs 3.11 or newer; install it"):
        setup.check_python([])


def test_old_python_hands_over_to_a_newer_one(monkeypatch):
    ran = []
    monkeypatch.setattr(setup.sys, "version_info", (3, 9, 2, "final", 0))
    monkeypatch.setattr(setup.shutil, "which", lambda name: {"python3.12": sys.executable}.get(name))
    monkeypatch.setattr(setup.os, "execv", lambda path, argv: ran.append(argv) or sys.exit(7))
    with pytest.raises(SystemExit):
        setup.check_python(["--torch", "cpu"])
    assert ran == [[sys.executable, str(ROOT / "scripts" / "setup.py"), "--torch", "cpu"]]


def test_full_disk(monkeypatch, tmp_path):
    usage = setup.shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(setup.Stop, match="1.0 GB are free .* the packages need 3 GB; free some"):
        setup.check_space(tmp_path / ".venv", "")


@pytest.mark.parametrize("output, sentence", [
    ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
     "The disk filled up while installing"),
    ("WARNING: Retrying ... NewConnectionError('... [Errno 111] Connection refused')\n"
     "ERROR: No matching distribution found for torch==2.13.0", "The package index can't be reached"),
    ("error: Request failed after 3 retries\n  cause: dns error", "The package index can't be reached"),
    ("ERROR: No matching distribution found for torch==2.13.0", "A pinned package has no build for"),
    ("something new\n", "The installer stopped with code 2: something new"),
    ("", "The installer stopped with code 2: no message"),
])
def test_failed_install_is_explained(output, sentence):
    assert setup.explain(output, 2).startswith(sentence)


def test_python_without_venv(monkeypatch, tmp_path):
    monkeypatch.setattr(setup.sys, "executable", "/bin/sh")     # fails as Debian's Python does
    script = "echo The virtual environment was not created because ensurepip is not available; exit 1"
    real = setup.subprocess.run
    monkeypatch.setattr(setup.subprocess, "run",
                        lambda command, **kw: real(["/bin/sh", "-c", script], **kw))
    with pytest.raises(setup.Stop, match=r"`apt install python3\.\d+-venv`"):
        setup.create(tmp_path / ".venv")


@pytest.mark.slow
def test_no_network_in_a_fresh_clone(checkout, tmp_path):
    """The real thing: a real venv, a real pip, and an index that refuses the connection."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    environ |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull,
                "PIP_RETRIES": "0", "HOME": str(tmp_path), "PIP_NO_CACHE_DIR": "1"}
    done = subprocess.run(["make", "lab", f"VENV={tmp_path / 'venv'}"], cwd=checkout, env=environ,
                          capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL)
    assert done.returncode
    assert "The package index can't be reached: check the network" in done.stderr
    assert "Traceback" not in done.stderr


# --- what decides whether to install ------------------------------------------------------------

@pytest.fixture
def steps(monkeypatch, tmp_path):
    """setup() with creating and installing replaced by a list of what would be done."""
    done = []
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(setup, "create", lambda venv: done.append("create"))
    monkeypatch.setattr(setup, "fill", lambda venv, torch, quiet: done.append(f"fill {torch}"))
    return done


def test_set_up_does_only_what_is_needed(steps, tmp_path, monkeypatch):
    def did(torch=""):
        steps.clear()
        setup.setup(tmp_path, torch)
        return list(steps)

    assert did("cpu") == ["fill cpu"]
    assert did("cpu") == []
    assert did("") == [], "no TORCH= keeps the wheels that are there"
    monkeypatch.setattr(setup, "EXTRAS", "mpi")
    assert did() == ["fill cpu"], "changed pins install in place, with the same wheels"
    assert did("cu128") == ["create", "fill cu128"]
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "pins", lambda: "other")
    assert did() == ["create", "fill cu128"], "a moved checkout starts again"
    (tmp_path / "bin" / "python").unlink()
    assert did() == ["create", "fill cu128"], "a broken environment starts again"
