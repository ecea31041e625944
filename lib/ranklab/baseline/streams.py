"""A CUDA stream in fifty lines: a queue of work that runs in order while Python fills it.

On a machine without a GPU a thread with a queue stands in; the names and rules are CUDA's.
"""

import queue
import threading
import time


class Event:
    """A point in a stream's queue; `synchronize` returns once the stream has reached it."""

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
        """Return the seconds from this event to `end`, after both are reached.

        CUDA's own method returns milliseconds.
        """
        return end.time - self.time


class Stream:
    """Run work in the order in which it was launched, independently of other streams."""

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
        """Tell the thread to end after the work in the queue."""
        self._queue.put(None)
