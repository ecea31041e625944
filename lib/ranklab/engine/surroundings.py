"""How a rank's process differs from others: no keyboard, forked workers, the first to be killed,
and a temporary folder that is removed with it.
"""

import builtins
import contextlib
import multiprocessing.context
import multiprocessing.util
import os
import shutil
import sys
import tempfile
import uuid

MOST_PATIENCE = 5  # the largest factor on a time limit when others use the cores
WORSE = 300  # of 1000: added to the score by which Linux picks the process to kill without memory
NO_KEYBOARD = ("a rank has no keyboard: ask before launch, and pass the answer as an argument; "
               "print() shows what a debugger would")


def settle(folder):
    """Set this process up as a rank: no keyboard, forked workers, the first to be killed.

    `folder` holds the sockets of its workers.
    """
    _without_keyboard()
    _fork_workers()
    _first_to_go()

    def temp_dir():
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return folder

    # multiprocessing would make a folder for each process that passes on a tensor, and a killed
    # process leaves it behind.
    multiprocessing.util.get_temp_dir = temp_dir


def _without_keyboard():
    keyboard = sys.stdin
    read = builtins.input

    def refuse(*args, **options):
        raise RuntimeError(NO_KEYBOARD)

    def ask(*args):
        return refuse() if sys.stdin is keyboard else read(*args)  # unless stdin was replaced

    builtins.input = ask  # pdb uses it as well
    sys.breakpointhook = refuse


def _fork_workers():
    """Fork the processes that multiprocessing starts in this rank, as before Python 3.14 (Linux).

    A fresh process does not know the classes of a cell. And for each lock, such as tqdm's, Python
    would start a process that complains when the rank is killed.
    """
    if sys.platform == "linux":  # not set_start_method(): the learner's code may call it, once
        default = multiprocessing.context._default_context
        default._default_context = multiprocessing.get_context("fork")


def _first_to_go():
    """Make Linux, out of memory, kill this process before the notebook."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        score = min(int(file.read()) + WORSE, 1000)
        file.seek(0)
        file.write(str(score))


def share_cores():
    """Let the thread on a core finish its turn when a thread of this process wakes up (Linux).

    While a message waits that its rank has not asked for yet, gloo's thread looks at it repeatedly,
    and each time took the core from a rank that computes: with four ranks on two cores, a step of
    tensor parallelism took three times as long. Threads made later inherit the setting.
    """
    with contextlib.suppress(AttributeError, OSError):  # not Linux; a sandbox that forbids it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextlib.contextmanager
def folder_of_workers():
    """Yield the path of a folder that a rank may make; remove it afterwards in any case."""
    path = os.path.join(tempfile.gettempdir(), f"ranklab-{uuid.uuid4().hex[:12]}")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def patience():
    """Return the factor for a time limit: 1 on an idle machine, more on a busy one.

    It is for processes that launch did not start: a launch already extends its timeout by the time
    for which its ranks waited for a core.
    """
    if not hasattr(os, "getloadavg"):  # Windows
        return 1
    return max(1, min(MOST_PATIENCE, os.getloadavg()[0] / os.cpu_count() - 1))
