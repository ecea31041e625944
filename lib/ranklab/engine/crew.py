"""The parent watches the ranks of one launch: their values, output, failures, and the time."""

import os
import pickle
import selectors
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import BinaryIO

from ranklab.engine import ship
from ranklab.engine.output import Output
from ranklab.engine.report import (Failure, HangError, RankError, Stack, Value, describe_exit,
                                   rank_names)
from ranklab.engine.server_lines import Lines

GRACE = 0.1  # seconds after the first failure in which others may report theirs
STACK_LIMIT = 1.0  # seconds for the ranks to say where they are
EXIT_LIMIT = 5.0  # seconds for released ranks to leave their group
CHUNK = 1 << 20


@dataclass
class Member:
    """One rank, as the parent sees it."""

    rank: int
    channel: socket.socket
    report_file: BinaryIO
    stack: bytearray = field(default_factory=bytearray)
    report: Value | Failure | None = None
    exit_code: int | None = None
    seconds: float | None = None  # from the launch to the report

    def is_settled(self):
        return self.report is not None or self.exit_code is not None

    def has_failed(self):
        return self.is_settled() and not isinstance(self.report, Value)


class Crew:
    """The ranks of one launch. Use as a context manager: at its end no rank is left."""

    def __init__(self, connection, job, stream):
        self.connection = connection
        self.lines = Lines(connection)
        self.job = job
        self.output = Output(job.ranks, stream)
        self.members = []
        self.selector = selectors.DefaultSelector()
        self.started = time.monotonic()

    def __enter__(self):
        with ship.scratch_file() as job_file:  # one copy for all ranks
            pickle.dump(self.job, job_file, protocol=5)
            job_file.flush()
            for rank in range(self.job.ranks):
                self._start(rank, job_file.fileno())
        self.selector.register(self.connection, selectors.EVENT_READ, self._read_exits)
        return self

    def _start(self, rank, job_fd):
        channel, theirs = socket.socketpair()
        output, output_end = os.pipe()
        stack, stack_end = os.pipe()
        report_file = ship.scratch_file()
        fds = [theirs.fileno(), output_end, stack_end, job_fd, report_file.fileno()]
        self.lines.request({"fork": rank}, fds)
        self.lines.wait_for("forked")
        theirs.close()
        os.close(output_end)
        os.close(stack_end)
        member = Member(rank, channel, report_file)
        self.members.append(member)
        self._watch(channel, lambda _: self._read_report(member))
        self._watch(output, lambda data: self.output.feed(rank, data))
        self._watch(stack, member.stack.extend)

    def _watch(self, source, take):
        """From now on `take` is called with what arrives at `source`, until its end."""

        def read():
            try:
                data = source.recv(CHUNK) if take_from_socket else os.read(source, CHUNK)
            except ConnectionError:
                data = b""
            if data:
                take(data)
            else:
                self.selector.unregister(source)
                source.close() if take_from_socket else os.close(source)

        take_from_socket = isinstance(source, socket.socket)
        self.selector.register(source, selectors.EVENT_READ, read)

    def _read_report(self, member):
        with member.report_file as file:
            member.report = ship.load_file(file.fileno())
        member.seconds = time.monotonic() - self.started

    def _read_exits(self):
        for message in self.lines.read():
            self.members[message["exit"]].exit_code = message["code"]

    def _wait(self, until, limit):
        """True as soon as `until()` holds; False once `limit` seconds have passed."""
        end = time.monotonic() + limit
        while not until():
            left = end - time.monotonic()
            if left <= 0:
                return False
            for key, _ in self.selector.select(timeout=left):
                key.data()
        return True

    def results(self):
        """The value of each rank.

        error  RankError when a rank raised or died; HangError when time is up
        """
        left = self.job.timeout - (time.monotonic() - self.started)
        in_time = self._wait(lambda: self._all_settled() or self._any_failed(), left)
        if self._any_failed():
            # A dead rank makes its peers fail within milliseconds: hear all before blaming one.
            self._wait(self._all_settled, GRACE)
            raise self._failure()
        if not in_time:
            raise self._hang()
        return [ship.loads(m.report.pickled) for m in self.members]

    def _all_settled(self):
        return all(m.is_settled() for m in self.members)

    def _any_failed(self):
        return any(m.has_failed() for m in self.members)

    def _failure(self):
        died = [m for m in self.members if m.is_settled() and m.report is None]
        raised = [m for m in self.members if isinstance(m.report, Failure)]
        raised.sort(key=lambda m: m.report.is_lost_peer())
        failures = {m.rank: self._reason(m) for m in died + raised}
        first = (died + raised)[0]
        of = f"rank {first.rank} of {self.job.ranks}"
        if first in died:
            text = f"{of} {describe_exit(first.exit_code, first.stack.decode(errors='replace'))}"
        else:
            text = f"{of} raised {failures[first.rank]}\n\n{first.report}".rstrip()
        return RankError(text + self._others(first.rank, failures), first.rank, failures)

    def _reason(self, member):
        if member.report is None:
            return describe_exit(member.exit_code)
        return member.report.headline()

    def _others(self, first, failures):
        by_reason = {}
        for rank, reason in failures.items():
            if rank != first:
                same = reason == failures[first]
                by_reason.setdefault("the same" if same else reason, []).append(rank)
        lines = [f"{rank_names(sorted(ranks))}: {reason}" for reason, ranks in by_reason.items()]
        return "\n\n" + "\n".join(lines) if lines else ""

    def _hang(self):
        waiting = [m for m in self.members if not m.is_settled()]
        for member in waiting:
            self.lines.request({"signal": member.rank, "number": signal.SIGUSR1.value})
        self._wait(lambda: all(_is_whole(m.stack) for m in waiting), STACK_LIMIT)
        lines = []
        for m in self.members:
            if m.is_settled():
                state = f"finished after {m.seconds:.1f} s, and waits to be released"
            else:
                state = str(Stack.parse(m.stack.decode(errors="replace")))
            lines.append(f"  rank {m.rank}  {state}")
        names = rank_names(m.rank for m in waiting)
        head = f"{names} of {self.job.ranks} did not finish within {self.job.timeout:g} s"
        return HangError("\n".join([head, *lines]), waiting[0].rank)

    def release(self):
        """Every rank has left its group and ended by itself, or was killed after EXIT_LIMIT."""
        for member in self.members:
            try:
                member.channel.send(b"r")
            except OSError:
                pass  # it died after its report; its value is here
        self._wait(self._all_gone, EXIT_LIMIT)

    def _all_gone(self):
        return all(m.exit_code is not None for m in self.members)

    def __exit__(self, kind, error, tb):
        try:
            for member in self.members:
                if member.exit_code is None:
                    self.lines.request({"signal": member.rank, "number": signal.SIGKILL.value})
            self._wait(self._all_gone, EXIT_LIMIT)
            self._drain()
        finally:
            self._close()
            self.output.flush()

    def _drain(self):
        """What the ranks wrote is here. Not until the end of file: a child of theirs may live."""
        while ready := self.selector.select(timeout=0):
            for key, _ in ready:
                key.data()

    def _close(self):
        for key in list(self.selector.get_map().values()):
            key.fileobj.close() if isinstance(key.fileobj, socket.socket) else os.close(key.fileobj)
        self.selector.close()
        self.connection.close()


def _is_whole(stack):
    """True when faulthandler has written the main thread, whose outermost frames come last."""
    return b"in main\n" in stack
