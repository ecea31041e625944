"""Build the real Horovod into the environment that runs this script: lab 05 compares with it.

Horovod's last release asks its compiler for C++14 where PyTorch's headers want C++20, so a small
wrapper around g++ changes that one flag; the source is left as it is. The wheel stays under
build/, so that the next environment has it in seconds. An interrupted build goes on where it was.
"""
import contextlib
import fcntl
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile

from sentences import AGAIN, Stop, said_once
from setup import ROOT

PLACE = ROOT / "build" / "horovod"
VERSION = "0.28.1"
JOBS = 2                                   # one compiler with PyTorch's headers takes 1 GB
WRAPPER = """#!/bin/bash
# Horovod's build asks for C++14; PyTorch's headers want C++20. Without -g it is half as long.
a=(); for x in "$@"; do case $x in -std=*) a+=(-std=c++20);; -g) ;; *) a+=("$x");; esac; done
exec g++ "${a[@]}"
"""


def check_tools():
    """Raise Stop where something is missing that pip can't bring."""
    if sys.platform != "linux":
        raise Stop("The real Horovod is built on Linux only; ranklab.horovod runs everywhere.")
    if not shutil.which("g++"):
        raise Stop("g++ is missing: install a C++ compiler (Debian, Ubuntu: `apt install g++`), "
                   "%s." % AGAIN)
    if not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise Stop("Python.h is missing: install Python's headers (Debian, Ubuntu: `apt install "
                   "python3.%d-dev`), %s." % (sys.version_info[1], AGAIN))


def has_mpi():
    """Return True when MPI's compiler finds its headers."""
    if not shutil.which("mpicxx"):
        return False
    tried = subprocess.run(["mpicxx", "-E", "-x", "c++", "-"], input=b"#include <mpi.h>\n",
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return tried.returncode == 0


def find_cmake():
    """Return a command for cmake: the machine's, or else one that pip puts under build/."""
    if shutil.which("cmake"):
        return "cmake"
    folder, command = PLACE / "cmake", PLACE / "run-cmake"
    if not command.exists():
        pip("install", "--quiet", "--target", folder, "cmake<4",
            failed="cmake is missing, and pip could not bring it: install it (Debian, Ubuntu: "
                   "`apt install cmake`), %s." % AGAIN)
        write_script(command, '#!/bin/sh\nPYTHONPATH="%s" exec "%s/bin/cmake" "$@"\n'
                     % (folder, folder))
    return str(command)


def pip(*arguments, failed):
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    if subprocess.call(command, stdin=subprocess.DEVNULL):
        raise Stop(failed)


def write_script(path, text):
    path.write_text(text)
    path.chmod(0o755)


def source():
    """Download and unpack Horovod's source, once; return its folder."""
    folder = PLACE / f"horovod-{VERSION}"
    archive = PLACE / f"horovod-{VERSION}.tar.gz"
    if folder.exists():
        return folder
    if not archive.exists():
        pip("download", "--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation",
            "--dest", PLACE, f"horovod=={VERSION}",
            failed="Horovod's source could not be fetched: check the network (and pip's settings, "
                   "such as a proxy or PIP_INDEX_URL), %s; nothing is lost." % AGAIN)
    half = PLACE / "unpacking"             # so that a folder with the right name is whole
    shutil.rmtree(half, ignore_errors=True)
    with tarfile.open(archive) as content:
        content.extractall(half, filter="data")
    (half / folder.name).rename(folder)
    half.rmdir()
    return folder


def build(folder, mpi):
    """Compile the wheel in `folder`. What the compiler says goes to build.log."""
    write_script(PLACE / "cxx20", WRAPPER)
    environ = {
        **os.environ, "CXX": str(PLACE / "cxx20"), "MAKEFLAGS": f"-j{JOBS}",
        "HOROVOD_CMAKE": find_cmake(), "HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1", "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI": "1",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # cmake 4 refuses what gloo asks for
    }
    with open(PLACE / "build.log", "w") as log, subprocess.Popen(
            [sys.executable, "setup.py", "bdist_wheel"], cwd=folder, env=environ, text=True,
            errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT) as process:
        wrong = follow(process.stdout, log)
    if process.returncode:
        raise Stop("Building Horovod stopped: %s (all of it is in build/horovod/build.log). The "
                   "same command goes on from here." % (wrong or "no message"))
    return next((folder / "dist").glob("*.whl"))


def follow(lines, log):
    """Print every tenth percent; return the first line that tells of an error."""
    shown, wrong = -10, ""
    for line in lines:
        log.write(line)
        percent = re.match(r"\[ *(\d+)%\]", line)
        if percent and int(percent[1]) >= shown + 10:
            shown = int(percent[1])
            print("%3d%% compiled" % shown, flush=True)
        if not wrong and re.search(r"\b(fatal )?error:|CMake Error|\*\*\* |No space left", line):
            wrong = line.strip()
    return wrong


def wheel():
    """Return a wheel for this Python, PyTorch and MPI; build it where there is none."""
    mpi = has_mpi()
    kind = "py3%d-torch%s-%s" % (sys.version_info[1], importlib.metadata.version("torch"),
                                 "mpi" if mpi else "gloo")
    shelf = PLACE / "wheels" / kind
    if found := list(shelf.glob("*.whl")):
        return found[0], mpi
    check_tools()
    if not mpi:
        print("No MPI compiler with headers: building with gloo alone. (Debian, Ubuntu: `apt "
              "install libopenmpi-dev` before; only Adasum needs it.)")
    folder = source()
    built_for = PLACE / "built-for"        # objects for another PyTorch are no start
    if built_for.exists() and built_for.read_text() != kind:
        for made in ("build", "dist"):
            shutil.rmtree(folder / made, ignore_errors=True)
    built_for.write_text(kind)
    print("building Horovod %s: 4 to 8 minutes on two cores, once" % VERSION, flush=True)
    made = build(folder, mpi)
    shelf.mkdir(parents=True, exist_ok=True)
    return shutil.move(made, shelf / made.name), mpi


@contextlib.contextmanager
def alone():
    """Let only one build at a time work in build/horovod."""
    PLACE.mkdir(parents=True, exist_ok=True)
    with open(PLACE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install():
    """Install the real Horovod into the environment that runs this script, and load it."""
    with alone():
        path, mpi = wheel()
        pip("install", "--quiet", "--no-deps", "--force-reinstall", path,
            failed="pip could not install the wheel that was built: delete build/horovod/, "
                   "%s." % AGAIN)
    done = subprocess.run([sys.executable, "-c", "import horovod.torch"], cwd="/",
                          capture_output=True, text=True)
    if done.returncode or "Warning" in done.stdout:
        raise Stop("Horovod is installed but does not load: %s; delete build/horovod/, %s."
                   % ((done.stdout + done.stderr).strip().splitlines()[-1], AGAIN))
    print("Horovod %s is installed (gloo%s): import horovod.torch as hvd"
          % (VERSION, " and MPI" if mpi else ""))


def main():
    return said_once(install, lambda error: "Building Horovod stopped: %s" % error)


if __name__ == "__main__":
    sys.exit(main())
