"""The parent's handle on the process that forks ranks (server.py)."""

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from ranklab.engine.report import describe_exit

START_LIMIT = 180  # seconds; a cold disk reads torch slowly
# Neither BLAS threads nor CUDA would survive the fork. So torch.cuda.is_available(), which some
# imports call, must ask the driver's library without initialising CUDA.
ENVIRON = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
           "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}
ONE_AT_A_TIME = threading.Lock()  # two threads may launch at once
SERVERS = {}  # by process: a forked copy of this process needs its own
MODULES = set()  # of ranklab, which ranks have imported: a server imports them before it forks


class ForkServer:
    """A server that starts; after wait_until_ready(), connect() begins a launch."""

    def __init__(self):
        self._started = time.monotonic()
        self._errors = tempfile.TemporaryFile()
        self._lifeline, server_end = socket.socketpair()
        with server_end:
            self._process = self._fresh(server_end.fileno())
        self._is_ready = False
        atexit.register(self._end)

    def _fresh(self, lifeline):
        package_root = str(Path(__file__).parents[2])
        paths = [package_root, os.environ.get("PYTHONPATH", "")]
        return subprocess.Popen(
            # -P: a learner's copy.py or types.py in the current directory must not hide Python's.
            [sys.executable, "-P", "-c", "import sys; from ranklab.engine.server import main; "
             "main(*map(int, sys.argv[1:]))", str(lifeline), str(os.getpid())],
            env={**os.environ, **ENVIRON, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            pass_fds=[lifeline],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )

    def wait_until_ready(self):
        """Wait until it has imported torch. Raises: RuntimeError that says why it did not start."""
        if self._is_ready:
            return
        self._lifeline.settimeout(max(0.001, self._started + START_LIMIT - time.monotonic()))
        try:
            ready = self._lifeline.recv(1)
        except TimeoutError:
            ready = b""
        except BaseException:  # Ctrl-C while torch is being imported
            self._process.kill()
            self.close()
            raise
        if not ready:
            raise RuntimeError(f"launch: the process that forks ranks did not start: "
                               f"{self._why_not()}")
        self._lifeline.settimeout(None)
        self._is_ready = True

    def _why_not(self):
        self.close()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        if last:
            return last[0]
        if time.monotonic() - self._started > START_LIMIT:
            return f"it was not ready after {START_LIMIT} s"
        return f"it {describe_exit(self._process.returncode)}"

    def connect(self) -> socket.socket:
        """Return a new connection: the lifetime of one launch."""
        connection, server_end = socket.socketpair()
        # If the server is dead, its end is read from `connection`.
        with server_end, contextlib.suppress(OSError):
            socket.send_fds(self._lifeline, [b"c"], [server_end.fileno()])
        return connection

    def is_alive(self) -> bool:
        if not self._is_ready:
            return True  # or wait_until_ready() says why not
        try:  # it never sends; a dying process closes this before wait() can see its end
            self._lifeline.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return self._process.poll() is None
        except OSError:
            pass
        return False

    def _end(self):
        if not self._is_ready:  # it would first import all of torch
            self._process.kill()
        self.close()

    def close(self):
        """End the server and all its ranks."""
        atexit.unregister(self._end)
        self._lifeline.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_fork_server():
    """Start this process's server, unless there is one. It imports torch while the caller goes on.
    """
    with ONE_AT_A_TIME:
        if os.getpid() not in SERVERS:
            SERVERS[os.getpid()] = ForkServer()


def fork_server() -> ForkServer:
    """Return this process's server, ready to fork; the first one takes about 3 s to start."""
    with ONE_AT_A_TIME:
        server = SERVERS.pop(os.getpid(), None) or ForkServer()
        if not server.is_alive():
            server.close()
            server = ForkServer()
        server.wait_until_ready()  # one that can't start is not asked again
        SERVERS[os.getpid()] = server
        return server
