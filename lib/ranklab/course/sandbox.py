"""Runs a function of regrade.py in a fork of the clean process, and leaves nothing behind.

    scratch/work/       where it runs: a cell that deletes its folder deletes a copy
    scratch/tmp, home   its $TMPDIR, its $RANKLAB_HOME

What it has to say comes as lines through a pipe, which ends with the process.
"""

import contextlib
import os
import tempfile
import time

import psutil

from ranklab.course.clean_process import CleanProcess
from ranklab.engine.server import PR_SET_CHILD_SUBREAPER, prctl

IMPORTS = 120  # seconds before the first line is late
POLL = 0.05  # seconds
DEATH_LIMIT = 5  # seconds for killed processes to be gone
LONGEST = 1 << 20  # bytes of lines; what comes after is dropped


@contextlib.contextmanager
def adopting():
    """Inside, Linux makes this process the parent of processes whose own parent has ended.

    Gives the clean process, for `run`.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    clean = CleanProcess()
    try:
        yield clean
    finally:
        clean.close()
        prctl(PR_SET_CHILD_SUBREAPER, 0)


def run(clean, function, scratch, given, limit, quiet_limit):
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
            clean.fork(function, scratch / "work", _environment(scratch), file.fileno(), write)
            os.close(write)
            text, in_time, seconds = _wait(clean, pipe, limit, quiet_limit)
        finally:
            end_all(spared, clean)
    return text.decode(errors="replace").split("\n")[:-1], in_time, seconds


def _environment(scratch):
    return {"TMPDIR": str(scratch / "tmp"), "RANKLAB_HOME": str(scratch / "home"),
            "TORCHINDUCTOR_CACHE_DIR": str(scratch / "tmp"), "IPYTHONDIR": str(scratch / "home"),
            "MPLBACKEND": "agg"}


def _wait(clean, pipe, limit, quiet_limit):
    text, begun, deadline = b"", None, time.monotonic() + IMPORTS
    while True:
        ended = clean.fork_has_ended()  # before the last look into the pipe
        now = time.monotonic()
        if new := pipe.read(LONGEST):
            text = (text + new)[:LONGEST]
            begun = begun or now
            deadline = min(begun + limit, now + quiet_limit)
        if ended or now > deadline:
            return text, ended, now - (begun or now)
        time.sleep(POLL)


def end_all(spared, clean):
    """Nothing is left of what this process started, except the children in `spared` and `clean`.

    Killing a process hands its children to this one (see `adopting`), whatever they made of their
    session and environment; they are killed in the next round.
    """
    deadline = time.monotonic() + DEATH_LIMIT
    while (left := list(_descendants(spared, clean))) or not clean.fork_has_ended():
        if time.monotonic() > deadline:
            break
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=0.2)  # and reaps them
        time.sleep(0 if left else POLL)
    if not clean.fork_has_ended():  # its fork has stopped it
        clean.close()
        end_all(spared, clean)


def _descendants(spared, clean):
    for child in psutil.Process().children():
        is_clean = clean.process and child.pid == clean.process.pid
        if is_clean or child not in spared:
            with contextlib.suppress(psutil.Error):
                yield from child.children(recursive=True)
        if not (is_clean or child in spared):
            yield child
