"""Does this rank wait only for other ranks? A thread of the rank answers that.

Yes, if each of its Python threads, by its innermost frame, is in one of these PLACES:

    for ranks      in Work.wait(), or where torch waits in C++
    for a thread   at a lock without a timeout, which only a thread of this process releases; or an
                   idle helper: the monitor of a tqdm bar, a worker of a pool
    for the end    the function has returned

and if only ranks of this launch can end the wait: no call and no group has a shorter timeout than
the launch, and all groups were made from the launch's group. Anything else that a thread does
(sleep, read a file, wait for a child process) may end by itself: then the answer is no. A
ProcessGroupGloo made by hand, with other processes or its own timeout, is not seen.
"""

import _thread
import concurrent.futures.thread
import contextlib
import functools
import signal
import sys
import threading
from datetime import timedelta

QUESTION, YES, NO = b"?", b"y", b"n"
AT_STORE, FROM_STORE = b"+", b"-"  # the main thread begins or ends a call that waits at the store
STORE_CALLS = "_new_process_group_helper", "_store_based_barrier"
FOR_RANKS, FOR_A_THREAD, FOR_THE_END, ON_ITS_OWN = range(4)
THREADING = threading.__file__
PLACES = {  # (end of a file's name, function) of an innermost frame; its timeout counts as well
    ("ranklab/engine/waiting.py", "until_released"): FOR_THE_END,
    ("ranklab/engine/waiting.py", "wait"): FOR_RANKS,
    ("torch/autograd/graph.py", "_engine_run_backward"): FOR_RANKS,  # DDP sums gradients
    ("torch/nn/parallel/distributed.py", "_distributed_broadcast_coalesced"): FOR_RANKS,
    ("torch/nn/parallel/distributed.py", "_pre_forward"): FOR_RANKS,  # DDP agrees on its buckets
    ("torch/distributed/utils.py", "_verify_param_shape_across_processes"): FOR_RANKS,
    ("torch/distributed/utils.py", "_sync_params_and_buffers"): FOR_RANKS,
    ("torch/distributed/_functional_collectives.py", "wait_tensor"): FOR_RANKS,  # DTensor
    ("torch/distributed/distributed_c10d.py", "_new_process_group_helper"): FOR_RANKS,
    ("torch/distributed/distributed_c10d.py", "_store_based_barrier"): FOR_RANKS,
    (THREADING, "wait"): FOR_A_THREAD,
    (THREADING, "join"): FOR_A_THREAD,
    (THREADING, "_wait_for_tstate_lock"): FOR_A_THREAD,
    (concurrent.futures.thread.__file__, "_worker"): FOR_A_THREAD,
}
OPERATOR = "torch/_ops.py"  # its caller is more informative
MONITOR = "tqdm/_monitor.py"  # of a bar: it wakes every 10 s, and sends nothing
ENDLESS = (None, -1, timedelta(0))  # no timeout, for a lock, join(), Work.wait()


class Waiting:
    """Answer each QUESTION on `channel` until this rank is released."""

    def __init__(self, channel):
        self.channel = channel
        self._released = None

    def begin(self, timeout, path):
        """Start answering, in a thread; call this once the default group is up.

        The group's ranks meet in the file `path`; its timeout is `timeout` seconds.
        """
        import torch.distributed as dist

        self._path = path
        # A group made without a timeout has torch's default, which may be shorter.
        self._limit = min(timedelta(seconds=timeout), dist.default_pg_timeout)
        dist.Work.wait = _with_a_frame(dist.Work.wait)
        for name in STORE_CALLS:
            call = getattr(dist.distributed_c10d, name)
            setattr(dist.distributed_c10d, name, _told(self.channel, call))
        released, begun = _thread.allocate_lock(), _thread.allocate_lock()
        released.acquire(), begun.acquire()
        # Not one of threading.enumerate().
        _thread.start_new_thread(self._listen, (released.release, begun.release))
        # In Python 3.14 a crash writes no stack while a thread has not begun.
        begun.acquire()
        self._released = released

    def until_released(self):
        if self._released:
            self._released.acquire()
        else:  # it never began, so nobody listens
            self._listen()

    def _listen(self, then=lambda: None, begun=lambda: None):
        begun()
        try:
            while self.channel.recv(1) == QUESTION:
                self.channel.send(self._answer())
        except OSError:  # the parent has gone
            pass
        finally:
            then()

    def _answer(self):
        try:
            return YES if self._is_for_ranks_alone() else NO
        except Exception:  # for example a backend that tells less than gloo
            return NO

    def _is_for_ranks_alone(self):
        frames = sys._current_frames()
        del frames[_thread.get_ident()]
        places = set(map(_place, frames.values()))
        if ON_ITS_OWN in places or signal.getitimer(signal.ITIMER_REAL)[0]:  # an alarm is set
            return False
        if FOR_RANKS not in places:
            return FOR_THE_END in places
        return self._only_ranks_can_end_it(frames.values())

    def _only_ranks_can_end_it(self, frames):
        """Return True if no group or call has a shorter timeout than the launch, and all groups use
        its store.
        """
        import torch.distributed as dist

        groups = dist.distributed_c10d._world.pg_map.items()
        stores = [store for _, (_, store) in groups]
        limits = [group._get_backend(device).options._timeout
                  for group, _ in groups for device in group._device_types]
        for arguments in (f.f_locals for frame in frames for f in _stack(frame) if _is_a_call(f)):
            limits.append(arguments.get("timeout"))
            stores.append(arguments.get("store") or stores[0])
        return (all(limit in ENDLESS or limit >= self._limit for limit in limits)
                and all(_path(store) == self._path for store in stores))


def _place(frame):
    """Return the place of the thread with this innermost frame."""
    while frame.f_code.co_filename.endswith(OPERATOR):
        frame = frame.f_back
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    place = next((PLACES[end, name] for end, name in PLACES
                  if function == name and file.endswith(end)), ON_ITS_OWN)
    if file == THREADING and frame.f_locals.get("timeout") not in ENDLESS:
        is_idle = any(f.f_code.co_filename.endswith(MONITOR) for f in _stack(frame))
        return place if is_idle else ON_ITS_OWN
    return place


def _is_a_call(frame):
    file = frame.f_code.co_filename
    return file == __file__ or "/torch/distributed/" in file


def _path(store):
    """Return the file in which the ranks that share this store meet."""
    return getattr(store, "_underlying_non_prefix_store", store).path


def _stack(frame):
    while frame:
        yield frame
        frame = frame.f_back


def _with_a_frame(real):
    """Wrap Work.wait in a Python function, so that stacks show it."""

    @functools.wraps(real)
    def wait(work, timeout=timedelta(0)):
        return real(work, timeout)

    return wait


def _told(channel, real):
    """Wrap a call so that the main thread tells the parent when it begins and ends (stall.py)."""

    def tell(word):
        if threading.current_thread() is threading.main_thread():
            with contextlib.suppress(OSError):  # the parent has gone
                channel.send(word)

    @functools.wraps(real)
    def call(*args, **keywords):
        tell(AT_STORE)
        try:
            return real(*args, **keywords)
        finally:
            tell(FROM_STORE)

    return call
