"""Make .venv ready: a Python that is new enough, the pinned packages, and ranklab in place.

Standard library only, and nothing newer than Python 3.6 in the syntax, so that an old Python can
still say what is wrong. A second run compares a stamp and is done in 0.1 s. Every way to fail ends
in one sentence that says what to do.
"""
import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys

from sentences import (
    AGAIN, NEWEST, OLDEST, SPACE_FOR_CUDA, SPACE_NEEDED, Stop, cause, explain, said_once,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXTRAS = "course,mpi,bench,hf,cluster,site"   # the extras that install in seconds
NCCL = "2.30.7"    # from 2.30.3 on several ranks may share a GPU; torch 2.13 brings 2.29.7


def check_platform():
    """Only where ranks can run: Linux and macOS pass, Windows is sent to WSL."""
    if sys.platform == "win32":
        raise Stop("ranklab needs Linux or macOS: on Windows run `wsl --install` once, "
                   "open the Ubuntu terminal, and do `make lab` there.")


def new_enough(python):
    """True when the command `python` starts and is OLDEST or newer."""
    code = "import sys; sys.exit(sys.version_info[:2] < %r)" % (OLDEST,)
    try:
        return subprocess.call([python, "-c", code], stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def has_pip(venv):
    """False where making the environment was interrupted before its last step."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('pip') is None)"
    return subprocess.call([str(venv / "bin" / "python"), "-c", code]) == 0


def check_python(argv):
    """This Python is new enough; an old one is replaced by a newer one of this machine."""
    if sys.version_info[:2] >= OLDEST:
        return
    for minor in range(OLDEST[1], NEWEST[1] + 1):      # the older ones are the better tried
        python = shutil.which("python3.%d" % minor)
        if python and new_enough(python):
            os.execv(python, [python, os.path.abspath(__file__)] + argv)
    raise Stop("Python %s is too old: ranklab needs 3.%d or newer; install it (Debian, Ubuntu: "
               "`apt install python3.12 python3.12-venv`), then `make lab PYTHON=python3.12`."
               % (platform.python_version(), OLDEST[1]))


def check_space(venv, torch):
    """Refuses to start what can't finish; says it early when only the CUDA wheels would not fit."""
    free = shutil.disk_usage(str(venv.parent)).free
    if free < SPACE_NEEDED:
        raise Stop("The disk is nearly full: %.1f GB are free in %s and the packages need %.0f GB; "
                   "free some, %s." % (free / 1e9, venv.parent, SPACE_NEEDED / 1e9, AGAIN))
    if free < SPACE_FOR_CUDA and sys.platform == "linux" and torch != "cpu":
        print("%.1f GB are free; PyTorch with CUDA takes up to %.0f GB. Without a GPU use "
              "TORCH=cpu." % (free / 1e9, SPACE_FOR_CUDA / 1e9))


def pins():
    """A hash of everything that decides what is installed."""
    files = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    content = (EXTRAS + NCCL).encode() + b"".join(f.read_bytes() for f in files)
    return hashlib.sha256(content).hexdigest()


def read_stamp(venv):
    """What the last finished set-up wrote, or {}."""
    try:
        stamp = json.loads((venv / "ranklab-setup.json").read_text())
        return {"root": stamp["root"], "torch": stamp.get("torch", ""), "pins": stamp["pins"]}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


@contextlib.contextmanager
def alone(venv):
    """Only one set-up at a time works on `venv`: two pips in one folder would spoil it."""
    import fcntl                           # not on Windows, which never comes here
    with open(str(venv) + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(command, screen=True):
    """The exit code of an installer, and its warnings and errors, which also go to the screen."""
    process = subprocess.Popen([str(c) for c in command], cwd=str(ROOT), universal_newlines=True,
                               stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    lines = []
    for line in process.stderr:            # stdout goes to the screen by itself
        lines.append(line)
        if screen:
            sys.stderr.write(line)
    return process.wait(), "".join(lines)


def install(*command):
    """run(), and Stop with the sentence for it where it fails."""
    code, output = run(command)
    if code:
        raise Stop(explain(output, code), cause(output))


def create(venv):
    """A fresh, empty environment at `venv`; an older environment there is removed, nothing else."""
    if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists():
        raise Stop("%s holds something that is not a Python environment: name another folder "
                   "(VENV=...), or empty this one." % venv)
    shutil.rmtree(str(venv), ignore_errors=True)
    made = subprocess.run([sys.executable, "-m", "venv", str(venv)],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if made.returncode:
        output = made.stdout.decode(errors="replace")
        shutil.rmtree(str(venv), ignore_errors=True)
        if "ensurepip" in output:          # Debian and Ubuntu ship Python without it
            raise Stop("This Python can't make environments: install its venv package (Debian, "
                       "Ubuntu: `apt install python3.%d-venv`), %s."
                       % (sys.version_info[1], AGAIN))
        raise Stop(explain(output, made.returncode))


def pin(name):
    """`name` with its pinned version, as constraints.txt has it."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line.split()[0] for line in lines if line.startswith(name + "=="))


def choose_torch(python, torch, pinned):
    """PyTorch's wheels for `torch` (cpu, cu128, ...) are installed.

    error  Stop; its cause is "torch's index" where only PyTorch's own index can't be reached
    """
    wanted = pin("torch")
    # A mirror or a folder that pip was told about comes first; the public index has no tags.
    # No -c here: beside pins pip calls what an index lacks a conflict. Ours come afterwards, and a
    # conflict is with pins of the user's own pip.
    code, output = run([python, "-m", "pip", "install", "--quiet", "--no-deps",
                        "%s+%s" % (wanted, torch)], screen=False)
    if code == 0:
        return
    if cause(output) not in ("no build", "nothing", "conflict"):
        sys.stderr.write(output)
        raise Stop(explain(output, code), cause(output))
    # pip has no way to choose PyTorch's own index by a short name; uv has.
    install(python, "-m", "pip", "install", pin("uv"))
    try:
        install(python, "-m", "uv", "pip", "install", "--python", python,
                "--torch-backend=" + torch, *pinned, wanted)
    except Stop as stop:
        if stop.cause != "network":
            raise
        raise Stop("PyTorch's own index can't be reached: check the network, %s; or TORCH=pip "
                   "takes pip's default, up to 3 GB." % AGAIN, "torch's index")


def choose_cpu_if_it_comes(venv, pinned):
    """The wheels that we chose: "cpu", or "" where PyTorch's own index is out of reach."""
    print("No GPU here (nvidia-smi is not on the PATH), so PyTorch's CPU wheels are taken, 0.2 GB; "
          "TORCH=pip takes those with CUDA, 3 GB.", flush=True)
    try:
        choose_torch(venv / "bin" / "python", "cpu", pinned)
        return "cpu"
    except Stop as stop:
        if stop.cause != "torch's index":  # nobody asked for the gigabytes of pip's default
            raise
    free, unreached = shutil.disk_usage(str(venv.parent)).free, "PyTorch's index can't be reached"
    if free < SPACE_FOR_CUDA:
        raise Stop("%s, and pip's default, with CUDA, takes up to %.0f GB where %.1f GB are free: "
                   "check the network, or free some space, %s."
                   % (unreached, SPACE_FOR_CUDA / 1e9, free / 1e9, AGAIN))
    print("%s: going on with pip's default, up to 3 GB." % unreached, flush=True)
    return ""


def fill(venv, torch, quiet):
    """The pins are installed, and ranklab in place (edits of lib/ count at once).

    torch  the wheels' tag; "" is pip's default; None is for us to choose
    returns  the tag that was taken
    """
    python, pinned = venv / "bin" / "python", ["-c", "constraints.txt"]
    if torch is None:
        torch = choose_cpu_if_it_comes(venv, pinned)
    elif torch:
        choose_torch(python, torch, pinned)
    install(python, "-m", "pip", "install", *pinned, "-e", ".[%s]" % EXTRAS,
            *(["--quiet"] if quiet else []))
    return torch


# name and version of the NCCL that pip installed with torch, if any
WHICH_NCCL = """import importlib.metadata as metadata
for each in metadata.distributions():
    if (each.name or "").startswith("nvidia-nccl-cu"):
        print(each.name, each.version)"""


def bring_nccl(venv):
    """Where a GPU is, an NCCL that lets ranks share it is in the place of torch's, if that can't.

    Without it all else works, so that it does not come is no error.
    """
    if not shutil.which("nvidia-smi"):
        return
    python = str(venv / "bin" / "python")
    said = subprocess.run([python, "-c", WHICH_NCCL], stdout=subprocess.PIPE,
                          universal_newlines=True).stdout.split()
    if len(said) != 2 or numbers(said[1]) >= numbers(NCCL):
        return
    name, version = said
    # --no-deps: torch asks for exactly its own version.
    code, _ = run([python, "-m", "pip", "install", "--quiet", "--no-deps", name + "==" + NCCL],
                  screen=False)
    if code:
        print("NCCL %s could not be had, so ranks can't share a GPU; all else works with torch's "
              "NCCL %s." % (NCCL, version), flush=True)
    else:
        print("NCCL %s is in the place of torch's %s: with RANKLAB_SHARE_GPU=1 several ranks share "
              "a GPU." % (NCCL, version), flush=True)


def numbers(version):
    """(2, 30, 7), to compare by."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def wheels(asked, stamp):
    """The tag of PyTorch's wheels: as TORCH= says, else as they are, else None: chosen later."""
    if asked:
        return "" if asked == "pip" else asked
    if stamp:                              # an environment of before we chose holds pip's default
        return stamp["torch"]
    has_gpu = sys.platform != "linux" or shutil.which("nvidia-smi")
    return "" if has_gpu else None


def setup(venv, asked):
    """`venv` holds exactly what this checkout asks for; `asked` is what TORCH= says."""
    stamp = read_stamp(venv)
    torch = wheels(asked, stamp)
    wanted = {"root": str(ROOT), "torch": torch, "pins": pins()}
    works = new_enough(str(venv / "bin" / "python"))
    if works and stamp == wanted:
        return
    check_space(venv, "cpu" if torch is None else torch)
    # A folder that was moved keeps the old place in its scripts; two kinds of torch don't mix.
    moved = stamp and (stamp["root"], stamp["torch"]) != (wanted["root"], torch)
    if not works or moved or not has_pip(venv):
        print("making %s with Python %s" % (venv, platform.python_version()))
        create(venv)
        stamp = {}
    print("installing the pinned packages into %s: 2 minutes on a fast line" % venv, flush=True)
    wanted["torch"] = fill(venv, torch, quiet=bool(stamp))
    bring_nccl(venv)
    (venv / "ranklab-setup.json").write_text(json.dumps(wanted))


def main(argv):
    parser = argparse.ArgumentParser(description="make .venv ready")
    parser.add_argument("--venv", default=".venv", help="where the environment is")
    parser.add_argument("--torch", default="",
                        help="PyTorch's wheels: cpu, pip (pip's default), auto, a tag like cu128")
    options = parser.parse_args(argv)

    def work():
        check_platform()
        check_python(argv)
        venv = pathlib.Path(os.path.abspath(options.venv))
        with alone(venv):
            setup(venv, options.torch)

    return said_once(work, lambda error: explain(str(error), 1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
