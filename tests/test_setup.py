"""The set-up: `make lab` in a fresh clone, second runs, a clear sentence for each way to fail."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from conftest import ROOT, load_script

setup = load_script("setup")


def run_make(checkout, *arguments, **environ):
    """`make ...` in the fresh clone, with a HOME that is empty."""
    home = checkout.parent / "home"
    home.mkdir(exist_ok=True)
    return subprocess.run(["make", *arguments], cwd=checkout, text=True, timeout=100,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT,
                          env={**os.environ, "HOME": str(home), **environ})


# --- make -------------------------------------------------------------------------------------

def test_second_run_only_looks_at_the_stamp(checkout):
    done = run_make(checkout, "setup")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("venv", ["my env", "{here}/my env"])
def test_a_folder_with_spaces(tmp_path, venv):
    """VENV= may hold them, and so may the place of the clone: with a stand-in for its Python."""
    here = tmp_path / "my clone"
    (here / "my env" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", here)
    python = here / "my env" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$PATH" "$@"\n')
    python.chmod(0o755)
    for rule, starts in (("doctor", ["doctor"]), ("lab", ["work", "--port=8888"])):
        done = run_make(here, rule, "PYTHON=true", f"VENV={venv.format(here=here)}")
        lines = done.stdout.splitlines()
        assert done.returncode == 0 and len(lines) == len(starts), done.stdout
        for line, wanted in zip(lines, starts):
            assert line.startswith(f"{here}/my env/bin:") and wanted in line, line


def test_help_lists_every_command(checkout):
    rules = re.findall(r"^([a-z]+):", (checkout / "Makefile").read_text(), re.M)
    done = run_make(checkout)
    for rule in set(rules) - {"setup"}:
        assert f"make {rule} " in done.stdout, rule


def test_make_lab_serves_the_labs_at_the_printed_address(checkout):
    home = checkout.parent / "home"
    home.mkdir(exist_ok=True)
    shutil.rmtree(checkout / "work", ignore_errors=True)  # of another test
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
            assert "/lab/tree/work/tour.ipynb?" in address[0]
            assert (checkout / "work" / "00_ranks.ipynb").exists()
            page = fetch(address[0])
            assert b"JupyterLab" in page
            assert b"apputils-extension:announcements" in page, "it would ask to fetch news"
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.communicate(timeout=30)


def fetch(address):
    """The page at `address`; Jupyter prints the address a moment before it listens."""
    for _ in range(100):
        try:
            with urllib.request.urlopen(address, timeout=30) as page:
                return page.read()
        except urllib.error.URLError:
            time.sleep(0.1)
    pytest.fail(f"nothing answers at {address}")


def test_no_python_is_a_sentence(checkout):
    done = run_make(checkout, "setup", "PYTHON=")
    assert done.returncode and "install Python 3.11 or newer" in done.stdout


def test_ci_runs_make_test_and_never_fails_on_debian_packages(checkout, tmp_path):
    called = tmp_path / "called"
    timeout = 'while [ "${1#-}" != "$1" ]; do shift 2; done; shift; exec "$@"'
    for name, script in {"make": f"echo $* >> {called}", "apt-get": "exit 1", "id": "echo 0",
                         "timeout": timeout}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    done = subprocess.run(["/bin/bash", checkout / ".ci" / "run"], capture_output=True, text=True,
                          env={"PATH": str(tmp_path), "CI": "true"}, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "going on without" in done.stdout
    assert called.read_text() == "test\nslurm\n"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("user, sentence", [
    (1000, "Other Pythons need root"), (0, "debootstrap could not make Debian trixie"),
])
def test_other_pythons_that_cannot_be_had_are_a_sentence(tmp_path, user, sentence):
    """`make pythons` itself takes an hour, and no test runs it."""
    for name, script in {"id": f"echo {user}", "debootstrap": "exit 1", "unshare": "exit 1",
                         "setpriv": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SUITES": ""}
    done = subprocess.run([ROOT / "scripts" / "pythons.sh", tmp_path / "pythons"], env=environ,
                          capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(sentence) and done.stderr.count("\n") == 1, done.stderr


# --- each way to fail -------------------------------------------------------------------------

def test_an_old_python_can_read_the_script():
    for name in ("setup.py", "sentences.py"):
        ast.parse((ROOT / "scripts" / name).read_text(), feature_version=(3, 6))


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
    newer = {"python3.12": sys.executable}
    monkeypatch.setattr(setup.shutil, "which", newer.get)
    monkeypatch.setattr(setup.os, "execv", lambda path, argv: ran.append(argv) or sys.exit(7))
    with pytest.raises(SystemExit):
        setup.check_python(["--torch", "cpu"])
    assert ran == [[sys.executable, str(ROOT / "scripts" / "setup.py"), "--torch", "cpu"]]


def test_full_disk(monkeypatch, tmp_path):
    usage = setup.shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(setup.Stop, match="1.0 GB are free .* the packages need 3 GB; free some"):
        setup.check_space(tmp_path / ".venv", "")


# What pip 23 and uv 0.13 printed when each was made to fail so, shortened.
PIP_HAS_NO_TAGS = (
    "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu (from "
    "versions: 2.12.1, 2.13.0)\nERROR: No matching distribution found for torch==2.13.0+cpu")
NO_CONNECTION = (
    "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by "
    "'NewConnectionError('<HTTPConnection>: [Errno 111] Connection refused')': /simple/torch/\n")
PIP_SEES_NOTHING = PIP_HAS_NO_TAGS.replace("2.12.1, 2.13.0", "none")
PIP_CONFLICT = (
    "ERROR: Cannot install beautifulsoup4==4.15.0 because these package versions have conflicting "
    "dependencies.\nERROR: ResolutionImpossible: for help visit the documentation")
UV_CLOSED = (
    "error: No solution found when resolving dependencies\n  cause: Because torch was not found "
    "in the package registry and you require torch==2.13.0, we can conclude ...\n\nhint: An index "
    "(its address) returned a 403 Forbidden error.")
UV_NO_NETWORK = "error: Request failed after 3 retries in 6.0s\n  cause: dns error"
NO_SPACE = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize("output, cause, sentence", [
    (NO_SPACE, "disk", "The disk filled up while installing"),
    (NO_CONNECTION + PIP_SEES_NOTHING, "network", "The package index can't be reached"),
    (UV_NO_NETWORK, "network", "The package index can't be reached"),
    (PIP_CONFLICT, "conflict", "The pinned versions do not fit each other or Python 3."),
    (NO_CONNECTION.replace("=0", "=4") + PIP_CONFLICT, "conflict", "The pinned versions do not"),
    (NO_CONNECTION + PIP_CONFLICT, "network", "The package index can't be reached"),
    (UV_CLOSED, "closed", "The package index refuses this machine"),
    ("ERROR: HTTP error 403 while getting a file", "closed", "The package index refuses"),
    (PIP_SEES_NOTHING, "nothing", "The package index shows nothing at all"),
    (PIP_HAS_NO_TAGS, "no build", "A pinned package has no build for"),
    (NO_CONNECTION + PIP_HAS_NO_TAGS, "no build", "A pinned package has no build for"),
    ("something new\n", "", "The set-up stopped with code 2: something new"),
    ("", "", "The set-up stopped with code 2: no message"),
])
def test_failed_install_is_explained(output, cause, sentence):
    assert setup.cause(output) == cause
    assert setup.explain(output, 2).startswith(sentence)


def test_python_without_venv(monkeypatch, tmp_path):
    script = "echo Not created because ensurepip is not available; exit 1"
    real = setup.subprocess.run
    monkeypatch.setattr(setup.subprocess, "run",
                        lambda command, **kw: real(["sh", "-c", script], **kw))    # as Debian's
    with pytest.raises(setup.Stop, match=r"`apt install python3\.\d+-venv`"):
        setup.create(tmp_path / ".venv")


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path, capsys):
    (tmp_path / "my thesis").write_text("")
    assert setup.main(["--venv", str(tmp_path)]) == 1
    assert "holds something that is not a Python environment" in capsys.readouterr().err
    assert (tmp_path / "my thesis").exists()


def test_a_place_that_cannot_be_written(capsys):
    assert setup.main(["--venv", "/proc/nowhere/.venv"]) == 1
    assert "The set-up stopped with code 1: [Errno 2] No such file" in capsys.readouterr().err


@pytest.mark.slow
def test_no_network_in_a_fresh_clone(checkout, tmp_path):
    """The real thing: a real venv, a real pip, and an index that refuses the connection."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    environ |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull,
                "PIP_RETRIES": "1", "HOME": str(tmp_path), "PIP_NO_CACHE_DIR": "1"}
    done = subprocess.run(["make", "lab", "TORCH=pip", f"VENV={tmp_path / 'venv'}"],
                          cwd=checkout, env=environ, capture_output=True, text=True, timeout=100,
                          stdin=subprocess.DEVNULL)
    assert done.returncode
    assert "The package index can't be reached: check the network" in done.stderr
    assert "Traceback" not in done.stderr


# --- what decides whether to install ------------------------------------------------------------

@pytest.fixture
def steps(monkeypatch, tmp_path):
    """setup() with creating and installing replaced by a list of what would be done."""
    done = []
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    # Not a link: it would lead to the Python that .venv was made from, which may have no pip.
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(setup, "create", lambda venv: done.append("create"))
    monkeypatch.setattr(setup, "check_space", lambda venv, torch: None)
    monkeypatch.setattr(setup, "fill",
                        lambda venv, torch, quiet: done.append(f"fill {torch}") or torch)
    return done


def gpus(monkeypatch, there):
    """From now on nvidia-smi is on the PATH, or not."""
    monkeypatch.setattr(setup.sys, "platform", "linux")
    monkeypatch.setattr(setup.shutil, "which", {"nvidia-smi": "/bin/nvidia-smi"}.get if there
                        else lambda name: None)


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


@pytest.mark.parametrize("there, asked, platform, wanted", [
    (False, "", "linux", None), (True, "", "linux", ""), (False, "", "darwin", ""),
    (False, "pip", "linux", ""), (True, "cpu", "linux", "cpu"), (False, "cu128", "linux", "cu128"),
])
def test_which_wheels_a_fresh_environment_gets(monkeypatch, there, asked, platform, wanted):
    gpus(monkeypatch, there)
    monkeypatch.setattr(setup.sys, "platform", platform)
    assert setup.wheels(asked, {}) == wanted


@pytest.mark.parametrize("old", [{"torch": ""}, {}, {"torch": "cpu"}, {"torch": "cu128"}])
def test_an_environment_that_is_there_keeps_its_wheels(steps, tmp_path, monkeypatch, old):
    gpus(monkeypatch, there=False)
    stamp = {"root": str(setup.ROOT), "pins": setup.pins(), **old}
    (tmp_path / "ranklab-setup.json").write_text(json.dumps(stamp))
    setup.setup(tmp_path, "")
    assert steps == []
    setup.setup(tmp_path, old.get("torch") or "pip")
    assert steps == [], "the same, said with TORCH="


@pytest.mark.parametrize("there, has, comes, says", [
    (True, "nvidia-nccl-cu13 2.29.7", True, "NCCL 2.30.7 is in the place of torch's 2.29.7"),
    (True, "nvidia-nccl-cu12 2.27.5", False, "NCCL 2.30.7 could not be had, so ranks can't share"),
    (True, "nvidia-nccl-cu13 2.32.3", True, ""), (True, "", True, ""),
    (False, "nvidia-nccl-cu13 2.29.7", True, "")])
def test_where_a_gpu_is_comes_an_nccl_that_can_share_it(monkeypatch, tmp_path, capsys, there, has,
                                                        comes, says):
    gpus(monkeypatch, there)
    (tmp_path / "bin").mkdir()
    python, calls = tmp_path / "bin" / "python", tmp_path / "calls"
    python.write_text(f'#!/bin/sh\ncase "$*" in *pip*) echo "$@" >>"{calls}"; exit {1 - comes};; '
                      f'*) echo "{has}";; esac\n')
    python.chmod(0o755)
    setup.bring_nccl(tmp_path)
    printed = capsys.readouterr().out
    assert says in printed and bool(says) == bool(printed)
    asked = calls.read_text() if calls.exists() else ""
    assert bool(asked) == bool(says)
    assert not says or asked.rstrip().endswith(f"--no-deps {has.split()[0]}==2.30.7")


def test_set_up_and_launch_name_the_same_nccl():
    from ranklab.engine import sharing

    assert setup.NCCL == sharing.WHEEL and setup.numbers(setup.NCCL) >= sharing.OLDEST


@pytest.fixture
def fresh(monkeypatch):
    """A fresh environment without a GPU, and a list of what would be installed beside torch."""
    gpus(monkeypatch, there=False)
    installed = []
    monkeypatch.setattr(setup, "install", lambda *command: installed.append(command))
    monkeypatch.setattr(setup, "check_space", lambda venv, torch: None)
    monkeypatch.setattr(setup, "create", lambda venv: None)
    free(monkeypatch, 20e9)
    return installed


def free(monkeypatch, room):
    """From now on `room` bytes are free on every disk."""
    usage = shutil.disk_usage("/")._replace(free=room)
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda path: usage)


def fails(cause):
    """A choose_torch that Stops for `cause`; None: it finds its wheels."""
    def choose(python, torch, pinned):
        assert torch == "cpu"
        if cause is not None:
            raise setup.Stop(f"it was: {cause}", cause)

    return choose


@pytest.mark.parametrize("reached", [True, False])
def test_without_a_gpu_the_cpus_wheels_or_else_pips_default(monkeypatch, tmp_path, capsys, fresh,
                                                            reached):
    monkeypatch.setattr(setup, "choose_torch", fails(None if reached else "torch's index"))
    setup.setup(tmp_path, "")
    said = capsys.readouterr().out
    assert said.count("No GPU here (nvidia-smi is not on the PATH), so PyTorch's CPU wheels") == 1
    assert ("going on with pip's default" in said) is not reached
    assert len(fresh) == 1, "the pins are installed either way"
    stamp = setup.read_stamp(tmp_path)
    assert stamp["torch"] == ("cpu" if reached else "")
    monkeypatch.setattr(setup, "new_enough", lambda python: True)
    monkeypatch.setattr(setup, "choose_torch", lambda *_: pytest.fail("torch is there"))
    setup.setup(tmp_path, "")
    assert len(fresh) == 1, "the second run finds what the first has made"


@pytest.mark.parametrize("cause", ["disk", "conflict", "closed", "network", "nothing", "no build",
                                   ""])
def test_no_other_failure_goes_on_to_gigabytes(monkeypatch, tmp_path, capsys, fresh, cause):
    monkeypatch.setattr(setup, "choose_torch", fails(cause))
    with pytest.raises(setup.Stop, match=f"it was: {cause}"):
        setup.setup(tmp_path, "")
    assert not fresh and "going on" not in capsys.readouterr().out


def test_pips_default_is_not_begun_where_it_does_not_fit(monkeypatch, tmp_path, fresh):
    monkeypatch.setattr(setup, "choose_torch", fails("torch's index"))
    free(monkeypatch, 5e9)
    with pytest.raises(setup.Stop, match="up to 10 GB where 5.0 GB are free"):
        setup.setup(tmp_path, "")
    assert not fresh


def test_wheels_that_were_asked_for_are_not_replaced_by_others(monkeypatch, tmp_path):
    def fail(*command):
        raise setup.Stop("no network")

    monkeypatch.setattr(setup, "choose_torch", fail)
    monkeypatch.setattr(setup, "install", lambda *command: pytest.fail("pip's default"))
    with pytest.raises(setup.Stop, match="no network"):
        setup.fill(tmp_path, "cpu", quiet=True)


@pytest.fixture
def installers(monkeypatch):
    """run() with pip's and uv's part played: set what each prints; None is success."""
    class Installers(dict):
        ran = []

    def run(command, screen=True):
        words = [str(word) for word in command]
        kind = ("uv" if "uv" in words[:3] else
                "pip's uv" if words[-1].startswith("uv==") else "pip")
        played.ran.append((kind, words))
        output = played.get(kind)
        return int(output is not None), output or ""

    played = Installers()
    monkeypatch.setattr(setup, "run", run)
    return played


@pytest.mark.parametrize("pip, asked", [
    (None, ["pip"]), (PIP_HAS_NO_TAGS, ["pip", "pip's uv", "uv"]),
    (PIP_SEES_NOTHING, ["pip", "pip's uv", "uv"]), (PIP_CONFLICT, ["pip", "pip's uv", "uv"]),
])
def test_torch_cpu_asks_pips_own_places_first_then_pytorchs(installers, tmp_path, pip, asked):
    installers["pip"] = pip
    setup.choose_torch(tmp_path / "python", "cpu", ["-c", "constraints.txt"])
    assert [kind for kind, _ in installers.ran] == asked
    assert installers.ran[0][1][-2:] == ["--no-deps", f"{setup.pin('torch')}+cpu"]
    # Beside the pins pip 23 says "ResolutionImpossible" where an index lacks one.
    assert not [words for kind, words in installers.ran if kind != "uv" and "-c" in words]
    assert all("--torch-backend=cpu" in words for kind, words in installers.ran if kind == "uv")


@pytest.mark.parametrize("prints, cause, sentence", [
    ({"pip": NO_SPACE}, "disk", "The disk filled up"),
    ({"pip": PIP_CONFLICT, "uv": UV_CLOSED}, "closed", "The package index refuses"),
    ({"pip": NO_CONNECTION + PIP_SEES_NOTHING}, "network", "The package index can't be reached"),
    ({"pip": "new"}, "", "The set-up stopped with code 1: new"),
    ({"pip": PIP_HAS_NO_TAGS, "pip's uv": NO_SPACE}, "disk", "The disk filled up"),
    ({"pip": PIP_HAS_NO_TAGS, "uv": NO_SPACE}, "disk", "The disk filled up"),
    ({"pip": PIP_HAS_NO_TAGS, "uv": UV_CLOSED}, "closed", "The package index refuses"),
    ({"pip": PIP_HAS_NO_TAGS, "uv": UV_NO_NETWORK}, "torch's index",
     "PyTorch's own index can't be reached: check the network"),
])
def test_torch_that_does_not_come_says_why(installers, tmp_path, prints, cause, sentence):
    installers.update(prints)
    with pytest.raises(setup.Stop, match=f"^{sentence}") as stopped:
        setup.choose_torch(tmp_path / "python", "cpu", ["-c", "constraints.txt"])
    assert stopped.value.cause == cause
    assert installers.ran[-1][0] == [*prints][-1], "nothing more is tried"
