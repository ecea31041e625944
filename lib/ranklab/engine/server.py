"""The process that forks ranks: it has imported torch once, so that a fresh rank costs milliseconds.

Why not `multiprocessing`'s forkserver: that one swallows an ImportError of its preload, imports
`__main__` again in every rank, freezes os.environ at its start, and hands each rank the pipe that
was to tell it of the parent's death. Here a socket is the lifetime of each thing:

    lifeline      kernel <-> server; when it closes, the server kills its ranks and ends
    connection    one per launch, handed over through the lifeline; when it closes, the ranks of
                  that launch are killed. Requests come in as JSON lines:
                      {"fork": rank}  with five descriptors (DESCRIPTORS)
                      {"signal": rank, "number": n}
                  and answers go out: {"forked": rank, "pid": n}, {"exit": rank, "code": c},
                  where c is the exit code, or minus the signal.
"""

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
import types

# Heavy, and needed by nearly every lab; a fresh rank would import them again and again.
# ranklab's own modules are not here: an edit must be seen by the next launch.
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
    "torch._dynamo",
)
DESCRIPTORS = ("channel", "output", "stack", "job", "report")


class Server:
    def __init__(self, lifeline: socket.socket):
        self.kernel = os.getppid()
        self.lifeline = lifeline
        self.launches = {}  # connection -> {pid: rank}
        self.selector = selectors.DefaultSelector()
        self.selector.register(lifeline, selectors.EVENT_READ, self.accept)
        self.woken, wake = socket.socketpair()  # a signal becomes a byte that select() sees
        self.wake = wake
        for end in (self.woken, wake):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self.selector.register(self.woken, selectors.EVENT_READ, self.reap)

    def serve(self):
        """Returns when the kernel is gone, with every rank dead."""
        self.alive = True
        while self.alive and os.getppid() == self.kernel:
            for key, _ in self.selector.select(timeout=0.5):
                key.data(key.fileobj)
        for connection in list(self.launches):
            self.end_launch(connection)

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
            data, fds, _, _ = socket.recv_fds(connection, 4096, len(DESCRIPTORS))
        except ConnectionError:
            data, fds = b"", []
        if not data:
            return self.end_launch(connection)
        for line in data.splitlines():
            request = json.loads(line)
            if "fork" in request:
                self.fork(connection, request["fork"], fds)
            else:
                self.signal(connection, request["signal"], request["number"])

    def fork(self, connection, rank, fds):
        pid = os.fork()
        if pid == 0:
            self.become_rank(rank, fds)  # never returns
        for fd in fds:
            os.close(fd)
        self.launches[connection][pid] = rank
        self.tell(connection, {"forked": rank, "pid": pid})

    def become_rank(self, rank, fds):
        code = 1
        try:
            die_with(os.getppid())
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.selector.close()
            # A rank that kept these would keep the others' end of life from being seen.
            for sock in (self.lifeline, self.woken, self.wake, *self.launches):
                sock.close()
            fd = dict(zip(DESCRIPTORS, fds, strict=True))
            os.dup2(fd["output"], 1)
            os.dup2(fd["output"], 2)
            os.close(fd.pop("output"))
            sys.modules["__main__"] = types.ModuleType("__main__")
            for name in [n for n in sys.modules if n.split(".")[0] == "ranklab"]:
                del sys.modules[name]  # imported anew, so that edits are seen
            importlib.import_module("ranklab.engine.rank").main(rank, **fd)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def signal(self, connection, rank, number):
        # Only pids not reaped yet are in the table, so a reused pid is never hit.
        for pid, r in self.launches[connection].items():
            if r == rank:
                os.kill(pid, number)

    def reap(self, woken):
        try:
            woken.recv(4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
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


def die_with(parent):
    """Linux kills this process when `parent` dies, however it dies."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def main(lifeline_fd):
    """Serves until the kernel is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the kernel decides; ranks inherit this
    lifeline = socket.socket(fileno=lifeline_fd)
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank must not copy the pages of everything imported here
    lifeline.sendall(b"r")
    Server(lifeline).serve()
