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
IMPORTS = 60  # seconds before the first line of the log is late
POLL = 0.05  # seconds
DEATH_LIMIT = 5  # seconds for killed processes to be gone


def run(function, scratch, log, limit, quiet_limit, *arguments):
    """`function` of regrade.py has run; False when it was ended for want of time.

    That is after `limit` seconds, or `quiet_limit` after the last line of its log. Whatever it
    has started is ended, too.
    """
    for folder in ("work", "tmp", "home", "kept"):
        (scratch / folder).mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", START, function, str(scratch), *arguments],
        cwd=scratch / "work", env=_environment(scratch), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        return _ends_in_time(process, log, limit, quiet_limit)
    finally:
        end_all(scratch)
        process.wait()


def _environment(scratch):
    paths = filter(None, [PACKAGES, os.environ.get("PYTHONPATH")])
    return {**os.environ, MARK: str(scratch), "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": str(scratch / "tmp"), "RANKLAB_HOME": str(scratch / "home"),
            "IPYTHONDIR": str(scratch / "home"), "MPLBACKEND": "agg"}


def _ends_in_time(process, log, limit, quiet_limit):
    started = time.monotonic()
    heard, length = started + IMPORTS, 0
    while process.poll() is None:
        now = time.monotonic()
        if length != (length := log.length()):
            heard = now
        if now > min(started + limit, heard + quiet_limit):
            return False
        time.sleep(POLL)
    return True


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
