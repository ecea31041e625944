"""The set-up: `make lab` in a fresh clone, second runs, a clear sentence for each way to fail."""

import ast
import functools
import http.server
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zipfile

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
PIP_SEES_NOTHING = (
    "ERROR: Could not find a version that satisfies the requirement uv==0.13.8 (from versions: "
    "none)\nERROR: No matching distribution found for uv==0.13.8")
PIP_NO_CONNECTION = (
    "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by "
    "'NewConnectionError('<HTTPConnection>: [Errno 111] Connection refused')': /simple/uv/\n")
UV_NONE = "error: No solution found when resolving dependencies\n  cause: Because "
UV_HAS_NO_TAGS = UV_NONE + "there is no version of torch==2.13.0+cpu and you require ..."
UV_CONFLICT = UV_NONE + "you require numpy==2.4.5 and numpy==2.4.6, we can conclude ..."
UV_SEES_NOTHING = UV_NONE + "torch was not found in the provided package locations and ..."
UV_CLOSED = (
    UV_NONE + "torch was not found in the package registry and you require torch==2.13.0 ...\n\n"
    "hint: An index (its address) returned a 403 Forbidden error.")
UV_LOGIN = UV_CLOSED.replace("403 Forbidden error", "... (401 Unauthorized)")
UV_NO_NETWORK = "error: Request failed after 3 retries in 7.0s\n  cause: dns error"
UV_BROKEN = UV_NO_NETWORK.replace("dns", "HTTP status server")
NO_SPACE = ("error: Failed to install: numpy\n  cause: failed to copy file: No space left on "
            "device (os error 28)")


@pytest.mark.parametrize("output, cause, sentence", [
    (NO_SPACE, "disk", "The disk filled up while installing"),
    (PIP_NO_CONNECTION + PIP_SEES_NOTHING, "network", "The package index can't be reached"),
    (UV_NO_NETWORK, "network", "The package index can't be reached"),
    (UV_BROKEN, "network", "The package index can't be reached"),
    (UV_CONFLICT, "conflict", "The pinned versions do not fit each other or Python 3."),
    (UV_CLOSED, "closed", "The package index refuses this machine"),
    (UV_LOGIN, "closed", "The package index refuses this machine"),
    ("ERROR: HTTP error 403 while getting a file", "closed", "The package index refuses"),
    (PIP_SEES_NOTHING, "nothing", "The package index shows nothing at all"),
    (UV_SEES_NOTHING, "nothing", "The package index shows nothing at all"),
    (UV_HAS_NO_TAGS, "no build", "A pinned package has no build for"),
    ("something new\n", "", "The set-up stopped with code 2: something new"),
    ("", "", "The set-up stopped with code 2: no message"),
])
def test_failed_install_is_explained(output, cause, sentence):
    assert setup.cause(output) == cause
    assert setup.explain(output, 2).startswith(sentence)


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path, capsys):
    (tmp_path / "my thesis").write_text("")
    assert setup.main(["--venv", str(tmp_path)]) == 1
    assert "holds something that is not a Python environment" in capsys.readouterr().err
    assert (tmp_path / "my thesis").exists()


def test_a_place_that_cannot_be_written(capsys):
    assert setup.main(["--venv", "/proc/nowhere/.venv"]) == 1
    assert "The set-up stopped with code 1: [Errno 2] No such file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("has_uv", [False, True])
def test_no_network_in_a_fresh_clone(checkout, tmp_path, has_uv):
    """The real thing: pip that is to fetch uv, or uv, and an index that refuses the connection."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    environ |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull,
                "PIP_RETRIES": "1", "HOME": str(tmp_path), "PIP_NO_CACHE_DIR": "1"}
    for name in ("python", "make", "bash", "sh", *["uv"] * has_uv):
        of = {"python": sys.executable, "uv": setup.find_uv()}.get(name) or shutil.which(name)
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).symlink_to(of)
    done = subprocess.run(["make", "lab", "TORCH=pip", f"VENV={tmp_path / 'venv'}",
                           f"PYTHON={sys.executable}"], cwd=checkout,
                          env=environ | {"PATH": str(tmp_path / "bin")}, capture_output=True,
                          text=True, timeout=100, stdin=subprocess.DEVNULL)
    assert done.returncode
    assert "The package index can't be reached: check the network" in done.stderr
    assert "Traceback" not in done.stderr
    assert ("http://127.0.0.1:9/simple/" in done.stderr) or not has_uv, "uv was told what pip was"


# --- uv, and what pip was told ------------------------------------------------------------------

def test_neither_uv_nor_pip_is_a_sentence(monkeypatch):
    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    monkeypatch.setattr(setup, "pin", lambda name: "uv==0")
    monkeypatch.setattr(setup, "has_pip", lambda: False)
    with pytest.raises(setup.Stop, match="Neither uv nor pip is here: .* python3-pip"):
        setup.find_uv()


@pytest.mark.parametrize("version, taken", [("0.4.30", False), ("0.9.0", True), ("1.0.2", True)])
def test_a_uv_of_the_path_that_is_too_old_is_passed_over(monkeypatch, tmp_path, version, taken):
    path, asked = tmp_path / "uv", []
    path.write_text(f"#!/bin/sh\necho uv {version}\n")
    path.chmod(0o755)
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "pin", lambda name: f"{name}==9.9.9")
    monkeypatch.setattr(setup.shutil, "which", lambda name: str(path))
    monkeypatch.setattr(setup, "install", lambda *command: asked.append(command[-1]))
    found = setup.find_uv()
    assert found == (str(path) if taken else f"{tmp_path}/build/uv==9.9.9/bin/uv")
    assert asked == ([] if taken else ["uv==9.9.9"])


@pytest.fixture
def told(monkeypatch, tmp_path):
    """A function that gives what an Uv takes, in an environment where pip was told `settings`."""
    def make(configuration="", **environ):
        (tmp_path / "pip.conf").write_text(configuration)
        for name in os.environ:
            if name.startswith(("UV_", "PIP_", "SSL_", "ALL_PROXY")):
                monkeypatch.delenv(name)
        for name, value in environ.items() | {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
                                              "HOME": str(tmp_path)}.items():
            monkeypatch.setenv(name, value)
        before = dict(os.environ)
        uv = setup.Uv(tmp_path / "venv")
        changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
        for name in changed:               # set by the script itself
            monkeypatch.setenv(name, changed[name])
        return uv, changed

    return make


def test_uv_is_told_what_pip_was(told):
    uv, environ = told("""[global]
index-url = http://127.0.0.1:9/a
extra-index-url = http://127.0.0.1:9/b
    http://127.0.0.1:9/c
find-links = /one /two
constraint = /limits.txt
[install]
index-url = http://127.0.0.1:9/of-install
trusted-host = 127.0.0.1
""", PIP_CERT="/certificate.pem", PIP_NO_INDEX="1", PIP_EXTRA_INDEX_URL="http://127.0.0.1:9/d")
    assert environ == {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/of-install",
                       "UV_INDEX": "http://127.0.0.1:9/d", "UV_FIND_LINKS": "/one,/two",
                       "UV_INSECURE_HOST": "127.0.0.1", "SSL_CERT_FILE": "/certificate.pem",
                       "UV_INDEX_STRATEGY": "unsafe-best-match"}
    assert uv.pins == ["-c", "constraints.txt", "-c", "/limits.txt", "--no-index"]


def test_what_uv_was_told_itself_counts(told):
    _, environ = told("[global]\nindex-url = http://127.0.0.1:9/a\nfind-links = /one\n",
                      UV_DEFAULT_INDEX="http://127.0.0.1:9/uv")
    assert environ == {}


def wheel(folder, version):
    """A wheel of torch that holds nothing."""
    path = folder / f"torch-{version}-py3-none-any.whl"
    files = {"METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
             "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
             "RECORD": ""}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"torch-{version}.dist-info/{name}", content)


@pytest.fixture
def index(tmp_path):
    """The address of a package index on loopback, and its folder for torch."""
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    folder = tmp_path / "index" / "simple" / "torch"
    folder.mkdir(parents=True)
    handler = functools.partial(Quiet, directory=tmp_path / "index")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple", folder
        server.shutdown()


@pytest.mark.parametrize("index_only", [False, True])
@pytest.mark.parametrize("tags, taken", [(["+cpu", ""], "+cpu"), ([""], "")])
def test_without_a_gpu_a_cpus_wheel_is_taken_wherever_there_is_one(told, index, tmp_path, capfd,
                                                                   index_only, tags, taken):
    """Real uv, with an index and a folder that pip was told of; PyTorch's is out of reach."""
    version = setup.pin("torch").partition("==")[2]
    address, of_index = index
    for tag in tags:
        wheel(tmp_path if tag and not index_only else of_index, version + tag)
    uv, _ = told(PIP_FIND_LINKS=str(tmp_path), PIP_INDEX_URL=address, UV_HTTP_RETRIES="0",
                 UV_CACHE_DIR=str(tmp_path / "cache"), ALL_PROXY="http://127.0.0.1:9",
                 NO_PROXY="127.0.0.1")
    setup.create(uv, uv.venv)
    torch = setup.choose_cpu_if_it_comes(uv)
    announced = "going on with the ordinary index's PyTorch, with CUDA, up to 3 GB"
    assert (announced in capfd.readouterr().out) is (tags == [""])
    setup.install(*uv.arguments(*torch, setup.pin("torch")))
    here = [path.name for path in uv.venv.rglob("torch-*.dist-info")]
    assert here == [f"torch-{version}{taken}.dist-info"]


def test_an_installers_progress_is_shown_but_not_its_150_names(capsys):
    lines = ["Resolved", "Installed 2 packages in 1s", " + a==1", " + b==2"]
    code, output = setup.run(["sh", "-c", 'printf "%s\\n" "$@" >&2; exit 3', "sh", *lines])
    assert (code, output.splitlines()) == (3, lines)
    assert capsys.readouterr().err.splitlines() == lines[:2]


def test_an_installer_draws_its_progress_in_a_terminal(monkeypatch):
    ours, its = pty.openpty()
    with open(ours, "rb", buffering=0) as screen, open(its, "w") as terminal:
        monkeypatch.setattr(setup.sys, "stderr", terminal)
        code, output = setup.run(["sh", "-c", "test -t 2 && printf '\\033[1mbar\\033[0m' >&2"])
        assert (code, output) == (0, "bar")
        assert screen.read(99) == b"\033[1mbar\033[0m"


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
    monkeypatch.setattr(setup, "find_uv", lambda: "uv")
    monkeypatch.setattr(setup, "create", lambda uv, venv: done.append("create"))
    monkeypatch.setattr(setup, "check_space", lambda venv, torch: None)
    monkeypatch.setattr(setup, "fill", lambda uv, torch: done.append(f"fill {torch}") or torch)
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
    python, asked = tmp_path / "bin" / "python", []
    python.write_text(f'#!/bin/sh\necho "{has}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(setup, "find_uv", lambda: "uv")
    monkeypatch.setattr(setup, "run", lambda command, screen: asked.append(command) or (
        (0, "") if comes else (1, UV_NO_NETWORK)))
    setup.bring_nccl(setup.Uv(tmp_path))
    printed = capsys.readouterr().out
    assert says in printed and bool(says) == bool(printed)
    assert bool(asked) == bool(says)
    assert not says or asked[0][-2:] == ["--no-deps", f"{has.split()[0]}==2.30.7"]


def test_set_up_and_launch_name_the_same_nccl():
    from ranklab.engine import sharing

    assert setup.NCCL == sharing.WHEEL and setup.numbers(setup.NCCL) >= sharing.OLDEST


@pytest.fixture
def installers(monkeypatch):
    """run() with uv's part played: what it prints where asked for a word; nothing is success."""
    class Installers(dict):
        ran = []

    def run(command, screen=True):
        words = [str(word) for word in command]
        played.ran.append(words)
        output = next((played[sign] for sign in played if any(sign in word for word in words)), "")
        return int(bool(output)), output

    played = Installers()
    gpus(monkeypatch, there=False)
    monkeypatch.setattr(setup, "find_uv", lambda: "uv")
    monkeypatch.setattr(setup, "run", run)
    monkeypatch.setattr(setup, "create", lambda uv, venv: venv.mkdir(exist_ok=True))
    free(monkeypatch, 20e9)
    return played


def free(monkeypatch, room):
    """From now on `room` bytes are free on every disk."""
    usage = shutil.disk_usage("/")._replace(free=room)
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda path: usage)


def test_the_second_run_finds_what_the_first_has_made(monkeypatch, tmp_path, capsys, installers):
    installers["+cpu"] = UV_HAS_NO_TAGS
    setup.setup(tmp_path, "")
    said = capsys.readouterr().out
    assert said.count("No GPU here (nvidia-smi is not on the PATH), so PyTorch's CPU wheels") == 1
    assert setup.read_stamp(tmp_path)["torch"] == "cpu"
    *_, last = installers.ran
    assert "--torch-backend=cpu" in last and last[-2:] == ["-e", f".[{setup.EXTRAS}]"]
    monkeypatch.setattr(setup, "new_enough", lambda python: True)
    installers.ran.clear()
    setup.setup(tmp_path, "")
    assert installers.ran == []


def test_without_pytorchs_index_the_ordinary_one(tmp_path, capsys, installers):
    installers |= {"+cpu": UV_HAS_NO_TAGS, "--torch-backend=cpu": UV_NO_NETWORK}
    setup.setup(tmp_path, "")
    assert "going on with the ordinary index's PyTorch" in capsys.readouterr().out
    assert setup.read_stamp(tmp_path)["torch"] == ""
    assert not {"torch==", "--torch"} & {word[:7] for word in installers.ran[-1]}


def test_gigabytes_are_not_begun_where_they_do_not_fit(monkeypatch, tmp_path, installers):
    installers |= {"+cpu": UV_HAS_NO_TAGS, "--torch-backend=cpu": UV_NO_NETWORK}
    free(monkeypatch, 5e9)
    with pytest.raises(setup.Stop, match="up to 10 GB where 5.0 GB are free"):
        setup.setup(tmp_path, "")
    assert not [words for words in installers.ran if "-e" in words]


@pytest.mark.parametrize("prints, cause, sentence", [
    ({"+cpu": NO_SPACE}, "disk", "The disk filled up"),
    ({"+cpu": UV_NO_NETWORK}, "network", "The package index can't be reached"),
    ({"+cpu": UV_CLOSED}, "closed", "The package index refuses"),
    ({"+cpu": "new"}, "", "The set-up stopped with code 1: new"),
    ({"+cpu": UV_HAS_NO_TAGS, "--torch-backend": NO_SPACE}, "disk", "The disk filled up"),
    ({"+cpu": UV_HAS_NO_TAGS, "--torch-backend": UV_HAS_NO_TAGS}, "no build",
     "PyTorch's own index has no torch==.* for the tag cpu"),
    ({"+cpu": UV_HAS_NO_TAGS, "-e": UV_CLOSED}, "closed", "The package index refuses"),
])
@pytest.mark.parametrize("asked", ["", "cpu"])
def test_no_other_failure_goes_on_to_gigabytes(tmp_path, capsys, installers, prints, cause,
                                               sentence, asked):
    installers.update(prints)
    with pytest.raises(setup.Stop, match=f"^{sentence}") as stopped:
        setup.setup(tmp_path, asked)
    assert stopped.value.cause == cause and "going on" not in capsys.readouterr().out
    assert any([*prints][-1] in word for word in installers.ran[-1]), "nothing more is tried"
    assert not setup.read_stamp(tmp_path)


@pytest.mark.parametrize("reason", [UV_NO_NETWORK, UV_CLOSED, UV_SEES_NOTHING])
def test_wheels_that_were_asked_for_are_not_replaced_by_others(tmp_path, installers, reason):
    installers |= {"+cpu": UV_HAS_NO_TAGS, "--torch-backend=cpu": reason}
    with pytest.raises(setup.Stop, match="^PyTorch's own index can't be reached: check"):
        setup.setup(tmp_path, "cpu")
    assert not [words for words in installers.ran if "-e" in words]
