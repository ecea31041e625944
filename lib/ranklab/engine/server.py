"""The process that forks ranks: it has imported torch once, so a fresh rank costs milliseconds.

Why not `multiprocessing`'s forkserver: it swallows an ImportError of its preload, imports
`__main__` again in every rank, freezes os.environ at its start, and gives each rank the pipe that
should tell it of the parent's death. Here a socket is the lifetime of each thing:

    lifeline      kernel <-> server; when it closes, the server kills its ranks and ends
    connection    one per launch, handed over through the lifeline; when it closes, the ranks of
                  that launch are killed. Requests come in as JSON lines:
                      {"fork": rank}  with six descriptors (DESCRIPTORS)
                      {"signal": rank, "number": n}
                      {"preload": [name, ...]}  modules
                  and answers go out:
                      {"forked": rank, "pid": n}  or with "error" if the fork failed
                      {"preloaded": [name, ...]}
                      {"exit": rank, "code": c}   c is the exit code, or minus the signal
"""

import atexit
import ctypes
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
import types
import weakref
from pathlib import Path

from ranklab.engine.cheap_forks import cheap_forks
from ranklab.engine.modules import Modules
from ranklab.engine.rank import main as run_rank

# Heavy, and needed by nearly every lab; a fresh rank would import them again and again.
# Of ranklab only the engine is imported at the start, as old as the kernel's; see modules.py.
PRELOAD = (
    "cloudpickle",
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.distributed.optim",  # DDP's constructor wants it
    "torch._dynamo",
    "ranklab.engine.rehearse",
)
DESCRIPTORS = ("channel", "output", "stack", "job", "report", "store")
END_LIMIT = 1.0  # seconds for killed ranks to be gone, before this process goes too
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PR_SET_CHILD_SUBREAPER = 36


class Server:
    def __init__(self, lifeline: socket.socket, kernel: int):
        self.pid, self.kernel = os.getpid(), kernel
        self.lifeline = lifeline
        self.launches = {}  # connection -> {pid: rank}
        self.modules = Modules()
        self.selector = selectors.DefaultSelector()
        self.selector.register(lifeline, selectors.EVENT_READ, self.accept)
        self.woken, wake = socket.socketpair()  # a signal becomes a byte that select() sees
        self.wake = wake
        for end in (self.woken, wake):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self.selector.register(self.woken, selectors.EVENT_READ, self.child_ended)

    def serve(self):
        """Serve until the kernel is gone; when this returns, every rank is dead."""
        self.alive = True
        while self.alive and os.getppid() == self.kernel:
            for key, _ in self.selector.select(timeout=0.5):
                key.data(key.fileobj)
        for connection in list(self.launches):
            self.end_launch(connection)
        end = time.monotonic() + END_LIMIT
        while self.reap() and time.monotonic() < end:
            time.sleep(0.01)

    def accept(self, lifeline):
        data, fds, _, _ = socket.recv_fds(lifeline, 1, 1)
        if not data:
            self.alive = False
            return
        connection = socket.socket(fileno=fds[0])
        self.launches[connection] = {}
        self.selector.register(connection, selectors.EVENT_READ, self.answer)

    def answer(self, connection):
        try:
            data, fds, _, _ = socket.recv_fds(connection, 1 << 16, len(DESCRIPTORS))
        except ConnectionError:
            data, fds = b"", []
        if not data:
            return self.end_launch(connection)
        for line in data.splitlines():
            request = json.loads(line)
            if "preload" in request:
                self.preload(connection, request["preload"])
            elif "fork" in request:
                self.fork(connection, request["fork"], fds)
            else:
                self.signal(connection, request["signal"], request["number"])

    def preload(self, connection, names):
        """Import the modules, as far as possible; the ranks report those that can't be imported."""
        self.modules.need(names)
        self.tell(connection, {"preloaded": names})

    def fork(self, connection, rank, fds):
        try:
            pid = os.fork()
        except OSError as error:  # memory, or a limit on processes
            self.tell(connection, {"forked": rank, "error": error.strerror})
        else:
            if pid == 0:
                self.become_rank(rank, fds)  # never returns
            self.launches[connection][pid] = rank
            self.tell(connection, {"forked": rank, "pid": pid})
        for fd in fds:
            os.close(fd)

    def become_rank(self, rank, fds):
        code = 1
        try:
            die_with(self.pid)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.selector.close()
            # If a rank kept these open, the end of the other ranks would go unnoticed.
            for sock in (self.lifeline, self.woken, self.wake, *self.launches):
                sock.close()
            fd = dict(zip(DESCRIPTORS, fds, strict=True))
            os.dup2(fd["output"], 1)
            os.dup2(fd["output"], 2)
            os.close(fd.pop("output"))
            # Or each rank takes back torch's operators: 30 ms.
            self.finalizers, weakref.finalize._registry = weakref.finalize._registry, {}
            sys.modules["__main__"] = types.ModuleType("__main__")
            run_rank(rank, **fd)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    def signal(self, connection, rank, number):
        # The table has only pids not yet reaped, so a reused pid is never signalled.
        for pid, r in self.launches[connection].items():
            if r == rank:
                os.kill(pid, number)

    def child_ended(self, woken):
        try:
            woken.recv(4096)
        except BlockingIOError:
            pass
        self.reap()

    def reap(self):
        """Reap and report the children that have ended; return True while others live."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                if not any(self.launches.values()):
                    kill_orphans()
                return True
            for connection, pids in self.launches.items():
                if pid in pids:
                    code = os.waitstatus_to_exitcode(status)
                    self.tell(connection, {"exit": pids.pop(pid), "code": code})

    def tell(self, connection, message):
        try:
            connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the launch is over for the kernel; select() reports its end next

    def end_launch(self, connection):
        self.selector.unregister(connection)
        for pid in self.launches.pop(connection):
            os.kill(pid, signal.SIGKILL)  # reaped later, by reap()
        connection.close()


def kill_orphans():
    """Kill processes that dead ranks had started, such as DataLoader workers, when no rank lives.

    Linux made these processes children of this one (a subreaper) when their rank died.
    """
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended meanwhile
        if parent == os.getpid():
            os.kill(int(stat.parent.name), signal.SIGKILL)


def prctl(option, value):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def die_with(parent):
    """Make Linux kill this process when `parent` dies, however it dies."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def main(lifeline_fd, kernel):
    """Serve until the process `kernel` is gone."""
    die_with(kernel)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the kernel decides; ranks inherit this
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until a rank can answer it with its stack
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of a dead rank come to this process
    lifeline = socket.socket(fileno=lifeline_fd)
    with cheap_forks():
        for name in PRELOAD:
            importlib.import_module(name)
    # At its end each rank would import code that draws a table of compile times, which nobody
    # reads: half of all the CPU time of a launch.
    atexit.unregister(getattr(sys.modules["torch._dynamo"].utils, "dump_compile_times", None))
    # init_process_group does it in each rank, if it is not done: 300 of 2,200 page faults.
    sys.modules["torch._dynamo"].trace_rules.clear_lru_cache()
    # From here on only the lifeline counts; Linux would also kill this process when the thread that
    # started it ends, although the kernel lives.
    prctl(PR_SET_PDEATHSIG, 0)
    lifeline.sendall(b"r")
    Server(lifeline, kernel).serve()
