"""A function of regrade.py in a process of its own, that leaves nothing behind.

    scratch/work/       where it runs: a cell that deletes its folder deletes a copy
    scratch/tmp, home   its $TMPDIR, its $RANKLAB_HOME
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

MARK = "RANKLAB_GRADING"  # in the environment of every process that a notebook starts
PACKAGES = str(Path(__file__).parents[2])
START = ("import sys; from ranklab.course import regrade; "
         "getattr(regrade, sys.argv[1])(*sys.argv[2:])")
IMPORTS = 120  # seconds before the first line of the log is late
POLL = 0.05  # seconds
DEATH_LIMIT = 5  # seconds for killed processes to be gone


def run(function, scratch, log, limit, quiet_limit, *arguments):
    """`function` of regrade.py has run: (True if it came to an end by itself, seconds).

    It is ended after `limit` seconds, or `quiet_limit` after the last line of its log, and with it
    whatever it has started. The clock begins with the first line: imports don't count.
    """
    for folder in ("work", "tmp", "home", "kept"):
        (scratch / folder).mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", START, function, str(scratch), *arguments],
        cwd=scratch / "work", env=_environment(scratch), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        return _wait(process, log, limit, quiet_limit)
    finally:
        end_all(scratch)
        process.wait()


def _environment(scratch):
    paths = filter(None, [PACKAGES, os.environ.get("PYTHONPATH")])
    return {**os.environ, MARK: str(scratch), "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": str(scratch / "tmp"), "RANKLAB_HOME": str(scratch / "home"),
            "IPYTHONDIR": str(scratch / "home"), "MPLBACKEND": "agg"}


def _wait(process, log, limit, quiet_limit):
    length, deadline = log.length(), time.monotonic() + IMPORTS
    begun = None
    while process.poll() is None:
        now = time.monotonic()
        if length != (length := log.length()):
            begun = begun or now
            deadline = min(begun + limit, now + quiet_limit)
        if now > deadline:
            return False, now - (begun or now)
        time.sleep(POLL)
    return True, time.monotonic() - (begun or time.monotonic())


def end_all(scratch):
    """No process of this notebook is left: neither ranks, nor what a cell put in the background.

    They are known by the mark in their environment, so no other process can be hit.
    """
    deadline = time.monotonic() + DEATH_LIMIT
    while (left := list(_marked(str(scratch)))) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=0.2)


def _marked(mark):
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                yield process
