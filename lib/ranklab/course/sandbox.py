"""A function of regrade.py in a process of its own, that leaves nothing behind.

    scratch/work/       where it runs: a cell that deletes its folder deletes a copy
    scratch/tmp, home   its $TMPDIR, its $RANKLAB_HOME

What it has to say comes as lines through a pipe, which ends with the process.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from ranklab.engine.server import PR_SET_CHILD_SUBREAPER, prctl

PACKAGES = str(Path(__file__).parents[2])
START = ("import sys; from ranklab.course import regrade; "
         "getattr(regrade, sys.argv[1])(int(sys.argv[2]))")
IMPORTS = 120  # seconds before the first line is late
POLL = 0.05  # seconds
DEATH_LIMIT = 5  # seconds for killed processes to be gone
LONGEST = 1 << 20  # bytes of lines; what comes after is dropped


@contextlib.contextmanager
def adopting():
    """Inside, Linux makes this process the parent of processes whose own parent has ended."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


def run(function, scratch, given, limit, quiet_limit):
    """`function` of regrade.py has run on the bytes `given`: (lines, it ended in time, seconds).

    It is ended after `limit` seconds, or `quiet_limit` after its last line, and with it whatever it
    has started. The clock begins with the first line: imports don't count.
    """
    for folder in ("work", "tmp", "home"):
        (scratch / folder).mkdir(exist_ok=True)
    spared = psutil.Process().children()
    read, write = os.pipe()
    os.set_blocking(read, False)
    with tempfile.TemporaryFile() as file, open(read, "rb", buffering=0) as pipe:
        file.write(given)
        file.seek(0)
        try:
            process = subprocess.Popen(
                # -P: a learner's json.py is not Python's, at least until Python's is imported.
                [sys.executable, "-P", "-c", START, function, str(write)], pass_fds=[write],
                cwd=scratch / "work", env=_environment(scratch), stdin=file,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
            os.close(write)
            text, in_time, seconds = _wait(process, pipe, limit, quiet_limit)
        finally:
            end_all(spared)
        process.wait()
    return text.decode(errors="replace").split("\n")[:-1], in_time, seconds


def _environment(scratch):
    paths = filter(None, [PACKAGES, os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": str(scratch / "tmp"), "RANKLAB_HOME": str(scratch / "home"),
            "IPYTHONDIR": str(scratch / "home"), "MPLBACKEND": "agg"}


def _wait(process, pipe, limit, quiet_limit):
    text, begun, deadline = b"", None, time.monotonic() + IMPORTS
    while True:
        ended = process.poll() is not None  # before the last look into the pipe
        now = time.monotonic()
        if new := pipe.read(LONGEST):
            text = (text + new)[:LONGEST]
            begun = begun or now
            deadline = min(begun + limit, now + quiet_limit)
        if ended or now > deadline:
            return text, ended, now - (begun or now)
        time.sleep(POLL)


def end_all(spared):
    """Nothing is left of what this process started, but for the children in `spared`.

    Killing a process hands its children to this one (see `adopting`), whatever they made of their
    session and environment; they are killed in the next round.
    """
    deadline = time.monotonic() + DEATH_LIMIT
    while (left := list(_descendants(spared))) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=0.2)  # and buries them


def _descendants(spared):
    for child in psutil.Process().children():
        if child not in spared:
            with contextlib.suppress(psutil.Error):
                yield from child.children(recursive=True)
            yield child
