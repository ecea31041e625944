"""For the tests of the engine: which processes live, and notebooks with real kernels."""

import contextlib
import os
import re
import sys
import time
import uuid
from pathlib import Path

import psutil
import torch.distributed as dist

MARK = "RANKLAB_TEST_MARK"  # in the environment of everything that a test starts


def new_mark():
    """A value for MARK that no other process of the machine has."""
    return uuid.uuid4().hex


def with_group(fn):
    """A hook of ranks: `fn` returns also whether the group was up when the hook was called."""
    is_up = dist.is_initialized()
    return lambda *args: (is_up, fn(*args))


def alive(mark):
    """The processes of that mark which live; a zombie does not."""
    found = []
    for process in psutil.process_iter():
        try:
            if (process.environ().get(MARK) == mark
                    and process.status() != psutil.STATUS_ZOMBIE):
                found.append(process)
        except psutil.Error:
            continue  # it ended meanwhile
    return found


def servers():
    """The processes below this one that fork ranks."""
    return [child for child in psutil.Process().children()
            if "ranklab.engine.server" in command_line(child)]


def ranks_alive():
    """The processes that this process's servers of ranks have forked."""
    return [rank.pid for server in servers() for rank in server.children(recursive=True)
            if "ranklab.engine.server" in command_line(rank)]


def command_line(process):
    """Its words; none of one that has ended, also while this was asked."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def eventually(condition, seconds=10):
    """True as soon as the condition holds, False if it does not within that time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


class Notebook:
    """A notebook without its page: a real kernel, and what each cell printed, gave or raised."""

    def __init__(self, folder):
        from jupyter_client import KernelManager

        self.mark = new_mark()
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder), env={**os.environ, MARK: self.mark})
        self.client = self.manager.blocking_client()
        self.pid = self.manager.provisioner.pid

    def wait_until_ready(self):
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def begin(self, code):
        """The cell has been sent; `end` waits for it."""
        return self.client.execute(code)

    def end(self, cell, timeout=60):
        """What the cell printed, and the traceback it showed, as one plain text."""
        shown = []
        end = time.monotonic() + timeout
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.01, end - time.monotonic()))
            if message["parent_header"].get("msg_id") != cell:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                shown.append(content["text"])
            elif message["msg_type"] == "execute_result":
                shown.append(content["data"]["text/plain"])
            elif message["msg_type"] == "error":
                shown.append("\n".join(content["traceback"]))
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return re.sub(r"\x1b\[[0-9;]*m", "", "".join(shown))

    def run(self, code, timeout=60):
        return self.end(self.begin(code), timeout)

    def wait_for_output(self, cell, text, timeout=60):
        """The cell has printed `text`."""
        seen = ""
        end = time.monotonic() + timeout
        while text not in seen:
            message = self.client.get_iopub_msg(timeout=max(0.01, end - time.monotonic()))
            if message["parent_header"].get("msg_id") == cell:
                seen += message["content"].get("text", "")

    def close(self):
        self.client.stop_channels()
        if psutil.pid_exists(self.pid):
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        for process in alive(self.mark):  # of a failed test
            with contextlib.suppress(psutil.Error):  # it has just ended
                process.kill()


def python_run(script, folder, *arguments, environ=None):
    """A subprocess.Popen of the script, marked; its `mark` says how to find what it started."""
    import subprocess

    mark = new_mark()
    environ = {**os.environ, MARK: mark, **(environ or {})}
    process = subprocess.Popen([sys.executable, *arguments, str(script)], cwd=folder, text=True,
                               env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    process.mark = mark
    return process


def write(path: Path, text):
    """The text without its common indentation is in the file."""
    import textwrap

    path.write_text(textwrap.dedent(text))
    return path
