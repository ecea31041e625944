"""Is an answer the learner's own, or does it call the library's function that it is to replace?

Calls are watched, not hindered: library code that is built on the answer works inside a check as
it does elsewhere, and nothing in the library is changed.
"""

import contextlib
import inspect
import sys
import threading
from pathlib import Path

from ranklab.checks.exercise import Mistake
from ranklab.engine.report import ENGINE, LIBRARIES, PACKAGE

CHECKS = str(Path(__file__).parent)
NO_FILE = "<frozen", "<string"  # importing; what dataclasses write


class LibrarysAnswer(Mistake):
    """The learner's code calls the very function that it is to replace."""

    def __init__(self, name):
        super().__init__(f"it calls the library's own {name}",
                         "Write the core yourself; the library's answer is what you rebuild here.")


@contextlib.contextmanager
def calls_watched(answer):
    """Inside, a call of `answer`, a function or a class, by the learner's code raises
    LibrarysAnswer, under whatever name it is reached, and also by way of other library code.
    """
    # By identity: code with the same text, on the same line of another file, is equal.
    codes = {id(function.__code__) for function in _functions(answer)}

    def see(frame, event, _):
        if event == "call" and id(frame.f_code) in codes and _is_of_learner(frame, answer):
            raise LibrarysAnswer(answer.__name__)

    before, of_threads = sys.getprofile(), threading.getprofile()
    sys.setprofile(see)
    threading.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(of_threads)


def _functions(answer):
    parts = vars(answer).values() if isinstance(answer, type) else [answer]
    parts = [inspect.unwrap(getattr(part, "__func__", part)) for part in parts if callable(part)
             or hasattr(part, "__func__")]
    return [part for part in parts if inspect.isfunction(part)]


def _is_of_learner(frame, answer):
    """False where library code calls, and the check, or nobody, has called that library code."""
    if isinstance(answer, type) and _is_theirs(frame, answer):
        return True
    by_library = False
    while frame := frame.f_back:
        file = frame.f_code.co_filename
        if file.startswith(CHECKS):
            break
        if not file.startswith((PACKAGE, *LIBRARIES, *NO_FILE)):
            return True
        by_library |= file.startswith(PACKAGE) and not file.startswith(ENGINE)
    return not by_library


def _is_theirs(frame, answer):
    """True in a method of an object whose class the learner has derived from `answer`."""
    first = frame.f_code.co_varnames[:1]
    kind = type(frame.f_locals.get(first[0])) if first else type(None)
    return (issubclass(kind, answer) and kind is not answer
            and not kind.__module__.startswith("ranklab."))
