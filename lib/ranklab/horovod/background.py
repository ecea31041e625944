"""The thread of each rank that negotiates and communicates, while the others compute.

In each cycle the ranks agree, with one small all-reduce, which cached tensors all of them have
and whether anybody has a name that is not cached; if so, names go to rank 0 and its answer to all.
Then the thread does what was agreed on. All ranks go through the same cycles, so whatever order
their tensors become ready in, their collectives come in one order.
"""

import threading
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ranklab.horovod.cache import ResponseCache, from_bits, to_bits
from ranklab.horovod.coordinator import Coordinator
from ranklab.horovod.execute import Executor
from ranklab.horovod.groups import leave
from ranklab.horovod.requests import Handle, HorovodInternalError, Mismatch, Request
from ranklab.horovod.trace import Recorder
from ranklab.meter import Traffic

IDLE = 0.02  # seconds: the longest pause between two cycles, while nothing happens
CACHED = ("allreduce", "allgather", "broadcast")


@dataclass
class Counts:
    """What the background thread of this rank has sent; see `counted`."""

    data: Traffic = field(default_factory=Traffic)
    negotiation: Traffic = field(default_factory=Traffic)
    cycles: int = 0
    name_cycles: int = 0  # those in which names went to rank 0
    tensors: int = 0  # that were reduced, gathered or broadcast


class Background:
    """Tensors come in by `submit`, and leave it finished. `control` and `data` are its own groups.

    error  HorovodInternalError, on every handle and from then on, when the thread has ended
    """

    def __init__(self, settings, control, data, device):
        self.rank = dist.get_rank(control)
        self.settings, self.control = settings, control
        self.sets = {0: tuple(range(dist.get_world_size(control)))}  # process set -> its ranks
        self.added = []  # the ProcessSets that got a number here
        self.groups = {0: data}  # process set -> its group, where this rank is in it
        self.recorder = Recorder()
        self.cache = ResponseCache(settings.cache_capacity)
        self.coordinator = Coordinator(self.sets, settings, self.recorder)  # rank 0's works
        self.executor = Executor(settings.fusion_threshold, self.groups, self.recorder, device)
        self.pending = {}  # name -> Handle, in the order of submit
        self.has_joined = False
        self.stopped = ""  # why the thread has ended
        self.counts = None
        self.numbers = Counter()  # process set -> how many of its tensors came without a name
        self.lock, self.wake = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._run, name="horovod", daemon=True)
        self.thread.start()

    def submit(self, *handles):
        """The handles are taken all at once: no cycle sees only some of them.

        error  a name that is still in the works; the thread has ended
        """
        named = {handle.request.name: handle for handle in handles}
        with self.lock:
            if self.stopped:
                raise HorovodInternalError(self.stopped)
            if twice := named.keys() & self.pending.keys():
                raise ValueError(f"a tensor named {min(twice)!r} is still in the works on this "
                                 "rank: wait for it, or choose another name")
            self.pending.update(named)
        self.wake.set()

    def full_name(self, name, process_set):
        """`name`, or the next number; sets other than 0 have names of their own."""
        with self.lock:
            if name is None:
                self.numbers[process_set] += 1
                name = f"noname.{self.numbers[process_set]}"
        return f"{name} of process set {process_set}" if process_set else name

    def stop(self, limit):
        """The threads of all ranks have ended and left their groups, or `limit` s are over."""
        try:
            self.submit(Handle(Request(f"shutdown.{self.rank}", "shutdown")))
        except (HorovodInternalError, ValueError):
            pass  # it has ended, or is about to
        self.thread.join(limit)
        self.recorder.stop()
        if not self.thread.is_alive():  # or it would lose them in the middle of a collective
            self._leave_groups()

    def _leave_groups(self, abort=False):
        """The thread has ended; may be called twice."""
        groups = [self.control, *self.groups.values()] if self.control is not None else []
        self.control = None
        self.groups.clear()  # the executor's are the same dict
        leave(groups, abort)

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
                    time.sleep(self.settings.cycle_time_ms / 1e3)  # let tensors gather
                    is_busy, reason = self._cycle()
                    pause = 0 if is_busy or self.pending else min(IDLE, 2 * pause + 1e-3)
            reason = f"Horovod has been shut down: {reason}"
        except Exception as error:  # a peer is gone, or a collective failed
            reason = f"Horovod's background thread on rank {self.rank} has ended: {error}"
            has_failed = True
        with self.lock:
            self.stopped = reason
            left, self.pending = self.pending, {}
        for handle in left.values():
            handle.finish(error=HorovodInternalError(reason))
        if has_failed:  # the others wait for this rank, and it will not come
            self._leave_groups(abort=True)

    def _cycle(self):
        """One round of agreeing and doing. Returns (was anything done?, why to stop or "")."""
        if self.recorder.mark_cycles:
            self.recorder.note("cycles", "CYCLE_START", time.perf_counter())
        with self.lock:
            mine = dict(self.pending)
        slots, by_name = set(), []
        too_long = time.perf_counter() - self.settings.stall_check / 2
        for handle in mine.values():
            slot = self.cache.slot(handle.request)
            if handle.is_sent:
                continue
            if slot is None or handle.asked < too_long:  # by name: rank 0 learns who has it
                by_name.append(handle)
            else:
                slots.add(slot)
        everywhere, any_names = self._agree(slots | self._not_mine(), by_name)
        if everywhere:
            self.coordinator.note_activity()
        responses = [self.cache.use(slot) for slot in everywhere]
        for one in (response.request for response in responses):
            if one.name in mine:
                since = mine[one.name].asked
                self.recorder.note(one.name, f"NEGOTIATE_{one.kind.upper()}", since)
        reason = ""
        if any_names:
            fresh, reason = self._negotiate(by_name)
            for response in fresh:
                self._remember(response, mine)
            responses += fresh
        self._do(responses, mine)
        return bool(responses), reason

    def _not_mine(self):
        """Slots that need not wait for this rank: of other process sets, or it has joined.

        A joined rank has zeros for an all-reduce; the rest goes by name, and is an error.
        """
        return {slot for slot, _, response in self.cache.entries.values()
                if response.request.process_set not in self.groups
                or self.has_joined and response.request.kind == "allreduce"}

    def _agree(self, slots, by_name):
        """(slots that are ready on all ranks, does anybody send names?), the same on all ranks."""
        if self.rank == 0:
            self.coordinator.check_stalls()
        n = 1 + len(self.cache.slots)
        is_silent = not by_name and not self.coordinator.stop
        bits = to_bits({slot + 1 for slot in slots} | ({0} if is_silent else set()), n)
        counts = self.counts
        with self._counting("negotiation"):
            dist.all_reduce(bits, dist.ReduceOp.BAND, group=self.control)
        found = from_bits(bits, n)
        if counts:
            counts.cycles += 1
            counts.name_cycles += 0 not in found
        return [i - 1 for i in found if i], 0 not in found

    def _negotiate(self, by_name):
        """(new responses, why to stop), the same on all ranks, after names went to rank 0."""
        for handle in by_name:
            handle.is_sent = True
            self.has_joined |= handle.request.kind == "join"
        mine = [handle.request for handle in by_name]
        lists = [None] * len(self.sets[0]) if self.rank == 0 else None
        answer = [None]
        with self._counting("negotiation"):
            dist.gather_object(mine, lists, group=self.control, group_dst=0)
            if self.rank == 0:
                for rank, requests in enumerate(lists):
                    self.coordinator.hear(rank, requests)
                changed = self.cache.outdated([r for one in lists for r in one])
                answer = [(changed, self.coordinator.answer(), self.coordinator.stop)]
            dist.broadcast_object_list(answer, group=self.control, group_src=0)
        changed, responses, reason = answer[0]
        for name in changed:  # ranks that had set its bit send it by name in the next cycle
            self.cache.evict(name)
        return responses, reason

    def _remember(self, response, mine):
        """A new response is in the cache, unless it is one of its kind, or an error."""
        request = response.request
        if request.kind in CACHED and not response.error:
            handle = mine.get(request.name)
            self.cache.put(handle.request if handle else request, response)

    def _do(self, responses, mine):
        """Everything in `responses` has been done, or is an error on its handle."""
        known, work = time.perf_counter(), []
        for response in responses:
            request = response.request
            handle = mine.get(request.name)
            if request.kind == "join":
                self.has_joined = False
                self._finish(handle, torch.tensor(response.sizes[0], dtype=torch.int))
            elif response.error and handle:
                self._finish(handle, error=Mismatch(response.error))
            elif request.process_set in self.groups and not response.error:
                work.append(response)
        counts = self.counts
        with self._counting("data"):
            for jobs in self.executor.run(work, mine, known):
                if counts:
                    counts.tensors += len(jobs)
                for job in jobs:
                    if job.handle:
                        self._finish(job.handle)

    def _finish(self, handle, output=None, error=None):
        with self.lock:  # its name is free before anybody learns that it is done
            del self.pending[handle.request.name]
        handle.finish(output, error)

    def _counting(self, what):
        counts = self.counts
        return getattr(counts, what).in_thread() if counts else nullcontext()
