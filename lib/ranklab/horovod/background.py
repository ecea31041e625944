"""The thread of each rank that negotiates and communicates while other threads compute.

In each cycle one small all-reduce tells whether any rank has new names. If so, the names go to
rank 0, and its answer goes to all ranks; then the thread runs the collectives agreed on. All ranks
go through the same cycles. So their collectives run in one order, in whatever order their tensors
become ready. (Horovod also has a response cache, left out here: a name that has been negotiated
before costs one bit.)
"""

import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ranklab.horovod.fusion import Executor
from ranklab.horovod.negotiation import (
    Coordinator, Handle, HorovodInternalError, Mismatch, Request,
)
from ranklab.horovod.trace import Recorder
from ranklab.meter import Traffic

IDLE = 0.02  # seconds: the longest pause between two cycles, while nothing happens


@dataclass
class Counts:
    """Counts of what this rank's background thread has sent; see `counted`."""

    data: Traffic = field(default_factory=Traffic)
    tensors: int = 0  # how many were reduced, gathered or broadcast


class Background:
    """Negotiate and communicate, in a thread, the tensors passed to `submit`.

    `control` and `data` are groups that only this thread uses.
    Raises: HorovodInternalError, for every pending and later handle, once the thread has ended.
    """

    def __init__(self, config, control, data, device):
        self.rank = dist.get_rank(control)
        self.config, self.control = config, control
        self.ranks = dist.get_world_size(control)
        self.recorder = Recorder()
        self.coordinator = Coordinator(self.ranks, config, self.recorder)  # only rank 0's is used
        self.executor = Executor(config.fusion_threshold, data, self.recorder, device)
        self.pending = {}  # name -> Handle, in the order of submit
        self.stopped = ""  # why the thread has ended
        self.counts = None
        self.unnamed = 0  # how many tensors came without a name
        self.lock, self.wake = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._run, name="horovod", daemon=True)
        self.thread.start()

    def submit(self, *handles):
        """Hand over the handles all at once, so that no cycle sees only some of them.

        Raises: ValueError for a name that is still pending; HorovodInternalError if the thread
            has ended.
        """
        named = {handle.request.name: handle for handle in handles}
        with self.lock:
            if self.stopped:
                raise HorovodInternalError(self.stopped)
            if duplicates := named.keys() & self.pending.keys():
                raise ValueError(f"a tensor named {min(duplicates)!r} is still in the works on "
                                 "this rank: wait for it, or choose another name")
            self.pending.update(named)
        self.wake.set()

    def next_name(self):
        """Return a name for an unnamed tensor; all ranks must submit these in the same order."""
        with self.lock:
            self.unnamed += 1
            return f"noname.{self.unnamed}"

    def stop(self, limit):
        """Wait at most `limit` seconds for the threads of all ranks to end, then leave the groups.

        A thread that is still inside a collective keeps its groups.
        """
        with suppress(HorovodInternalError, ValueError):  # it has ended, or is about to
            self.submit(Handle(Request(f"shutdown.{self.rank}", "shutdown")))
        self.thread.join(limit)
        self.recorder.stop()
        if not self.thread.is_alive():  # else it loses them inside a collective
            self._leave_groups()

    def _leave_groups(self, abort=False):
        """Leave this rank's two groups, so that nothing refers to them; may be called twice.

        A group's sockets, threads and files live as long as something refers to it. When they
        close, a peer that waits for this rank gets an error at once. With `abort` it does not wait
        for collectives in flight (NCCL; gloo never waits).
        """
        groups = [self.control, self.executor.group] if self.control is not None else []
        self.control = self.executor.group = None
        while groups:
            with suppress(Exception):  # the program may have destroyed all groups before
                if abort:
                    groups[-1].abort()
                dist.destroy_process_group(groups[-1])
            groups.pop()

    def _run(self):
        pause, reason, has_failed = 0, "", False
        try:
            if self.executor.device.type == "cuda":  # a new thread is on GPU 0
                torch.cuda.set_device(self.executor.device)
            with torch.no_grad():
                while not reason:
                    if self.wake.wait(pause):
                        self.wake.clear()
                        pause = 0
                    time.sleep(self.config.cycle_time_ms / 1e3)  # let tensors gather
                    is_busy, reason = self._cycle()
                    pause = 0 if is_busy or self.pending else min(IDLE, 2 * pause + 1e-3)
            reason = f"Horovod has been shut down: {reason}"
        except Exception as error:  # a peer is gone, or a collective failed
            reason = f"Horovod's background thread on rank {self.rank} has ended: {error}"
            has_failed = True
        with self.lock:
            self.stopped = reason
            unfinished, self.pending = self.pending, {}
        for handle in unfinished.values():
            handle.finish(HorovodInternalError(reason))
        if has_failed:  # the others wait for this rank, and it will not come
            self._leave_groups(abort=True)

    def _cycle(self):
        """Run one cycle; return (was anything done?, the reason to stop or "")."""
        with self.lock:
            pending = dict(self.pending)
        fresh = [handle for handle in pending.values() if not handle.is_sent]
        if not self._has_anybody_news(fresh):
            return False, ""
        responses, reason = self._negotiate(fresh)
        self._do(responses, pending)
        return bool(responses), reason

    def _has_anybody_news(self, fresh):
        """Return whether any rank has new names, the same on all ranks: an all-reduce of one byte.
        """
        if self.rank == 0:
            self.coordinator.check_stalls()
        news = torch.tensor(bool(fresh) or bool(self.coordinator.stop), dtype=torch.uint8)
        dist.all_reduce(news, dist.ReduceOp.MAX, group=self.control)
        return bool(news)

    def _negotiate(self, fresh):
        """Send names to rank 0; return (responses, reason to stop), the same on all ranks."""
        for handle in fresh:
            handle.is_sent = True
        lists = [None] * self.ranks if self.rank == 0 else None
        answer = [None]
        dist.gather_object([handle.request for handle in fresh], lists, group=self.control,
                           group_dst=0)
        if self.rank == 0:
            for rank, requests in enumerate(lists):
                self.coordinator.hear(rank, requests)
            answer = [(self.coordinator.answer(), self.coordinator.stop)]
        dist.broadcast_object_list(answer, group=self.control, group_src=0)
        return answer[0]

    def _do(self, responses, pending):
        """Carry out each of the `responses`, or set an error on its handle."""
        known, work = time.perf_counter(), []
        for response in responses:
            handle = pending[response.name]
            handle.rows = response.rows
            if response.error:
                self._finish(handle, error=Mismatch(response.error))
            else:
                work.append(handle)
        counts = self.counts
        with counts.data.in_thread() if counts else nullcontext():
            for handles in self.executor.run(work, known):
                if counts:
                    counts.tensors += len(handles)
                for handle in handles:
                    self._finish(handle)

    def _finish(self, handle, error=None):
        with self.lock:  # its name is free before anybody learns that it is done
            del self.pending[handle.request.name]
        handle.finish(error)
