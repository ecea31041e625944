"""The parent watches the ranks of one launch: their values, output, failures, and the time."""

import contextlib
import os
import pickle
import selectors
import signal
import socket
import time

from ranklab.engine import modules, sharing, ship, stall, verdict
from ranklab.engine.forkserver import MODULES
from ranklab.engine.rank import STARVED
from ranklab.engine.rank_handle import RankHandle
from ranklab.engine.report import RanksInterrupted
from ranklab.engine.server_lines import Lines, ServerDied
from ranklab.engine.stack import Stack

# After the first failure, wait for the others to report theirs: for as long again as the first
# took, since on a busy machine they may be that far behind, but within these limits, in seconds.
GRACE, LONGEST_GRACE = 0.1, 1.0
CAUSE_LIMIT = 5.0  # more seconds, while all failures so far are only lost peers

SMALLEST_STEP = 0.1  # second: a limit does not grow by less

PRELOAD_LIMIT = 180.0  # seconds to import what `preload` names, from a cold disk
START_LIMIT = 60.0  # seconds until all ranks are up; only then does the learner's time begin

# How long a launch may hold a cell after its `timeout`, at most: 5 s if it hangs or returns
# (STACK or RELEASE, then KILL and DRAIN); 8 s if a rank fails at the last moment only because it
# lost a peer (the two above, KILL and DRAIN).
STACK_LIMIT = 1.0  # seconds for the ranks to say where they are, or what they wait for
RELEASE_LIMIT = 2.5  # seconds for released ranks to leave their group
KILL_LIMIT = 1.5  # seconds for killed ranks to be gone
DRAIN_LIMIT = 0.5  # seconds for output that is still in the pipes
CHUNK = 1 << 20
WATCH_INTERVAL = 10  # seconds between two calls of `watch` with where the ranks are
QUESTIONS = 2  # a rank that is asked once may be about to read the message that wakes it


class WorkerGroup:
    """The ranks of one launch. Use as a context manager: when it exits, no rank is left."""

    def __init__(self, server, job, call, store, output, stall=None, preload=(), watch=None):
        self.connection = server.connect()
        self.lines = Lines(self.connection)
        self.job = job
        self.call = call
        self.store = store  # the file in which the ranks meet
        self.output = output
        self.stall, self.preload, self.watch = stall, preload, watch
        self.handles = []
        self.selector = selectors.DefaultSelector()
        self.started = time.monotonic()
        self.all_up = None  # when all ranks were up
        self.watch_time = self.started  # when `watch` was called last

    def __enter__(self):
        try:
            self._preload()
            with ship.scratch_file() as job_file:  # one copy for all ranks
                pickle.dump(self.job, job_file, protocol=5)
                job_file.write(self.call)
                job_file.flush()
                for rank in range(self.job.ranks):
                    self._start(rank, job_file.fileno())
            self.selector.register(self.connection, selectors.EVENT_READ, self._read_exits)
        except BaseException:  # Ctrl-C, or the system has no more processes or files
            self._close()
            raise
        return self

    def _preload(self):
        """Let the server import `preload`, what the call names and earlier ranks have imported."""
        names = [*self.preload, *{*modules.named_in(self.call), *MODULES}]
        if names:
            self.lines.request({"preload": names})
        if self.preload:  # heavy ones, perhaps
            self.lines.wait_for("preloaded", PRELOAD_LIMIT)
        elif names:
            self.lines.wait_for("preloaded")

    def _start(self, rank, job_fd):
        report_file = ship.scratch_file()
        with contextlib.ExitStack() as child_ends:  # this process closes them after the fork
            channel, channel_end = socket.socketpair()
            child_ends.enter_context(channel_end)
            handle = RankHandle(rank, channel, report_file)
            self.handles.append(handle)
            self._on_data(channel, lambda data: self._read_channel(handle, data))
            output_end = child_ends.enter_context(
                self._pipe(lambda data: self.output.feed(rank, data)))
            stack_end = child_ends.enter_context(self._pipe(handle.stack.extend))
            ends = [channel_end, output_end, stack_end]
            fds = [*(end.fileno() for end in ends), job_fd, report_file.fileno(),
                   self.store.fileno()]
            self.lines.request({"fork": rank}, fds)
            answer = self.lines.wait_for("forked")
        if "error" in answer:
            raise RuntimeError(f"launch: the system would not start rank {rank} of "
                               f"{self.job.ranks}: {answer['error']}")
        handle.pid = answer["pid"]

    def _pipe(self, take):
        """Return the writing end of a pipe; call take(data) with what arrives at the other."""
        source, end = os.pipe()
        self._on_data(os.fdopen(source, "rb", buffering=0), take)
        return os.fdopen(end, "wb", buffering=0)

    def _on_data(self, source, take):
        """Call take(data) whenever bytes arrive at `source`, until its end."""

        def read():
            try:
                data = os.read(source.fileno(), CHUNK)
            except ConnectionError:
                data = b""
            if data:
                take(data)
            else:
                self.selector.unregister(source)
                source.close()

        self.selector.register(source, selectors.EVENT_READ, read)

    def _read_channel(self, handle, data):
        if b"s" in data:  # started: it has met all others
            self.all_up = self.all_up or time.monotonic()
        handle.hear(data)
        if b"r" in data:
            handle.seconds = time.monotonic() - self.started  # first: Ctrl-C may come between
            handle.read_report()

    def _read_exits(self):
        for message in self.lines.read():
            self.handles[message["exit"]].exit_code = message["code"]

    def _wait(self, until, limit):
        """Return True as soon as `until()` holds; False once `limit` seconds have passed."""
        end, is_last = time.monotonic() + limit, False
        while not until():
            if is_last:
                return False
            left = end - time.monotonic()
            is_last = left <= 0  # look once more: on a busy machine this process may itself be late
            for key, _ in self.selector.select(timeout=max(left, 0)):
                key.data()
        return True

    def results(self):
        """Return the value of each rank.

        Raises RankError if a rank raised or died, HangError if time runs out.
        """
        def is_decided():
            return self._all_settled() or self._any_failed()

        try:
            # A busy machine starts ranks slowly; that is not the learner's time.
            self._wait(lambda: self.all_up or is_decided(), START_LIMIT)
            limit = self.job.timeout if self.all_up else START_LIMIT
            left = limit - (time.monotonic() - (self.all_up or self.started))
            in_time, extra = self._wait_for_the_starved(is_decided, left, STARVED * limit)
        except KeyboardInterrupt:
            self._ask_where(self._running())
            seconds = time.monotonic() - self.started
            raise RanksInterrupted(f"after {seconds:.1f} s\n"
                                   + verdict.whereabouts(self.handles)) from None
        if self._any_failed():
            # A dead rank makes its peers fail within milliseconds: hear all before blaming one.
            took = time.monotonic() - (self.all_up or self.started)
            self._wait(self._all_settled, min(max(GRACE, took), LONGEST_GRACE))
            self._wait(lambda: any(map(verdict.is_cause, self.handles)), CAUSE_LIMIT)
            for handle in self.handles:
                handle.last_words = self.output.last_words(handle.rank)
            raise verdict.failure(self.handles)
        if not in_time:
            self._ask_where(waiting := self._running())
            predicate = f"did not finish within {limit:g} s"
            predicate += f" (and {extra:.1f} s that they waited for a free core)" if extra else ""
            note = sharing.CAUSE_OF_HANG if self.job.share_gpu else ""
            raise verdict.hang(self.handles, waiting, predicate, note=note)
        return [h.report.pickled for h in self.handles]

    def _all_settled(self):
        return all(h.is_settled() for h in self.handles)

    def _any_failed(self):
        return any(h.has_failed() for h in self.handles)

    def _running(self):
        return [h for h in self.handles if not h.is_settled()]

    def _ask_where(self, handles):
        """Ask these ranks at which line they are; wait for the answers."""
        for handle in handles:
            handle.stack.clear()
            self._signal(handle, signal.SIGUSR1)
        self._wait(lambda: all(h.exit_code is not None or Stack.is_whole(h.stack)
                               for h in handles), STACK_LIMIT)

    def _wait_or_see_a_stall(self, until, limit):
        """Do the same as `_wait`, and meanwhile look for a deadlock if `stall` is set.

        Raises HangError as soon as all ranks sleep in communication.
        """
        if not (self.stall and stall.can_be_seen(self.job.on_gpus)):
            return self._wait(until, limit)
        part, end, stuck = self.stall / QUESTIONS, time.monotonic() + limit, 0
        sleep_watch = stall.Watch(part)
        while not self._wait(until, min(part / stall.LOOKS, end - time.monotonic())):
            now = time.monotonic()
            if now >= end:
                return False
            self._tell(now)
            in_store = {h.pid: h.store_calls for h in self.handles if h.is_at_store}
            if sleep_watch.all_asleep([h.pid for h in self.handles], now, in_store):
                stuck = stuck + 1 if self._are_stuck() else 0
                if stuck == QUESTIONS:
                    raise verdict.deadlock(self.handles, self._running(), self.stall)
        return True

    def _tell(self, now):
        """Tell `watch`, every WATCH_INTERVAL seconds, where the ranks are."""
        if self.watch and now - self.watch_time >= WATCH_INTERVAL:
            self.watch_time = now
            self._ask_where(self._running())
            self.watch(verdict.whereabouts(self.handles))

    def _wait_for_the_starved(self, until, limit, extra_limit):
        """Wait `limit` seconds, plus up to `extra_limit` seconds in which a rank was ready to run
        but got no core. Returns (whether `until()` holds, the extra seconds).
        """
        extra, step = 0, limit
        while not self._wait_or_see_a_stall(until, step):
            queued = max(stall.seconds_in_queue(h.pid) for h in self._running())
            step = min(queued, extra_limit) - extra
            if step < SMALLEST_STEP:
                return False, extra
            extra += step
        return True, extra

    def _are_stuck(self):
        """Ask all ranks whether they wait only for other ranks, and where.

        Returns True if all do, and none has ended since.
        """
        running = self._running()
        for handle in self.handles:  # a thread of one that is done may still send
            handle.ask()
        self._wait(lambda: all(h.has_answered() for h in self.handles), STACK_LIMIT)
        if not all(h.waits for h in self.handles):
            return False
        self._ask_where(running)
        return self._running() == running

    def _signal(self, handle, number):
        self.lines.request({"signal": handle.rank, "number": number.value})

    def release(self):
        """Let every rank leave its group and exit by itself; __exit__ kills those that do not."""
        for handle in self.handles:
            with contextlib.suppress(OSError):  # it died after its report; its value is here
                handle.channel.send(b"r")
        self._wait(self._all_gone, RELEASE_LIMIT)

    def _all_gone(self):
        return all(h.exit_code is not None for h in self.handles)

    def __exit__(self, kind, error, tb):
        MODULES.update(self.handles[0].modules)
        try:
            for number in (signal.SIGSTOP, signal.SIGKILL):  # so that none reports another's death
                for handle in self.handles:
                    if handle.exit_code is None:
                        self._signal(handle, number)
            with contextlib.suppress(ServerDied):  # and its ranks with it
                self._wait(self._all_gone, KILL_LIMIT)
            self._drain()
        finally:
            self._close()
            self.output.flush()

    def _drain(self):
        """Read what the ranks wrote, but not to the end of file: a rank's child may live on."""
        self.selector.unregister(self.connection)
        end = time.monotonic() + DRAIN_LIMIT
        while (ready := self.selector.select(timeout=0)) and time.monotonic() < end:
            for key, _ in ready:
                key.data()

    def _close(self):
        self.connection.close()  # for the server this ends the launch, with all its ranks
        for key in list(self.selector.get_map().values()):
            if key.fileobj is not self.connection:
                key.fileobj.close()
        self.selector.close()
        for handle in self.handles:
            handle.report_file.close()
