"""A sign of life during a long check: the time so far, and the line the learner's code is at."""

import contextlib
import os
import sys
import threading
import time
import traceback

from ranklab.course.show import notebooks_display
from ranklab.engine.report import ENGINE, Frame

EVERY = 10  # seconds


@contextlib.contextmanager
def signs_of_life(name):
    """Report every 10 s, until the block ends, that the check of `name` still runs.

    In a notebook: one line, updated in place, cleared at the end. In a terminal: lines on stderr.
    Elsewhere, and where solutions are built: nothing.
    Yields: a function to which launch passes the ranks' positions; None if nothing is reported.
    """
    say = _screen()
    if say is None:
        yield None
        return
    started, is_over, main = time.monotonic(), threading.Event(), threading.main_thread().ident

    def tell(position):
        seconds = time.monotonic() - started
        say(f"{name}: still checking after {seconds:.0f} s\n{position}".rstrip())

    def look():
        while not is_over.wait(EVERY):
            frames = [Frame(frame.f_code.co_filename, line, frame.f_code.co_name)
                      for frame, line in traceback.walk_stack(sys._current_frames().get(main))]
            if not any(frame.file.startswith(ENGINE) for frame in frames):  # else launch tells
                frames_of_learner = [frame for frame in frames if frame.is_of_learner()]
                tell(str(frames_of_learner[0]) if frames_of_learner else "")

    threading.Thread(target=look, daemon=True).start()
    try:
        yield tell
    finally:
        is_over.set()
        say("")


def _screen():
    """Return a function that replaces the last text shown with a new one, or None."""
    if os.environ.get("RANKLAB_ANSWERS") == "1":  # solutions are built: they keep what is shown
        return None
    if display := notebooks_display():
        handles = []

        def say(text):
            if handles:
                handles[0].update({"text/plain": text}, raw=True)
            elif text:
                handles.append(display({"text/plain": text}, raw=True, display_id=True))

        return say
    if sys.stderr.isatty():
        return lambda text: text and print(text, file=sys.stderr)
    return None
