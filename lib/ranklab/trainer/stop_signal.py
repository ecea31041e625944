"""StopSignal: end a training run cleanly after a SIGTERM."""

import signal
import threading


class StopSignal:
    """Only note a SIGTERM inside the block; the ranks then agree after which step to stop.

    A scheduler sends the signal before it takes the machine away, and never to all ranks in the
    same step: a rank that stopped by itself would leave the others waiting in an all-reduce.
    """

    def __init__(self):
        self.received = False  # by this rank
        self.agreed = False  # by all ranks: set when they agree to stop

    def note(self, *_):
        self.received = True

    def __enter__(self):
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:  # no other thread may handle signals
            self._before = signal.signal(signal.SIGTERM, self.note)
        return self

    def __exit__(self, *_):
        if self._is_main:
            signal.signal(signal.SIGTERM, self._before)
