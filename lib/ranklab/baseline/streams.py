"""A CUDA stream in fifty lines: a queue of work, run in order, beside the Python that fills it.

The stand-in for machines without a GPU is a thread with a queue; the names and rules are CUDA's.
"""

import queue
import threading
import time


class Event:
    """A point in a stream's queue: `wait` returns when the stream has come so far."""

    def __init__(self):
        self._reached = threading.Event()
        self.time = None  # seconds, on the stream's clock, when it was reached

    def reach(self):
        self.time = time.perf_counter()
        self._reached.set()

    def synchronize(self):
        """Block the caller until the stream has reached this event."""
        self._reached.wait()

    def elapsed_time(self, end):
        """Return the seconds from this event to `end`, when both are reached.

        CUDA's own method gives milliseconds.
        """
        return end.time - self.time


class Stream:
    """Run work in the order in which it was launched; two streams know nothing of each other."""

    def __init__(self):
        self._queue = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        for work in iter(self._queue.get, None):
            work()

    def launch(self, kernel, *args):
        """Put `kernel(*args)` into the queue; return at once, before it has run."""
        self._queue.put(lambda: kernel(*args))

    def record(self):
        """Return an Event that is reached when everything now in the queue has run."""
        event = Event()
        self._queue.put(event.reach)
        return event

    def wait_event(self, event):
        """Make everything launched from now on run after `event`; the caller does not wait."""
        self._queue.put(event.synchronize)

    def synchronize(self):
        """Block the caller until everything now in the queue has run."""
        self.record().synchronize()

    def close(self):
        """Tell the thread to end after the work that is in the queue."""
        self._queue.put(None)
