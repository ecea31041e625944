"""Is an answer the learner's own, or does it call the library's function that it is to replace?

Calls are watched, not blocked: library code built on the answer works inside a check as it does
elsewhere. A profiler would see the calls as well, but cost a quarter of a check's time.
"""

import contextlib
import inspect
import sys
import types
from pathlib import Path

from ranklab.checks.exercise import Mistake
from ranklab.engine.report import ENGINE, LIBRARIES, PACKAGE

CHECKS = str(Path(__file__).parent)
NO_FILE = "<frozen", "<string"  # importing; what dataclasses write


class LibrarysAnswer(Mistake):
    """The learner's code calls the very function that it should replace."""

    def __init__(self, name):
        super().__init__(f"it calls the library's own {name}",
                         "Write the core yourself: the library's version is what you are "
                         "rebuilding here.")


def is_made_of(learner_fn, answer):
    """Return whether a function has the same code as `answer`, under the decorators of both.

    Decorators are unwrapped because contextlib's has the same code for every context manager.
    """
    own, right = (getattr(inspect.unwrap(fn), "__code__", fn) for fn in (learner_fn, answer))
    return own is right


@contextlib.contextmanager
def calls_watched(answer):
    """Raise LibrarysAnswer, inside the block, when the learner's code calls `answer`.

    `answer` is a function or a class. A call counts under any name, including calls through other
    library code.
    Inside the block its functions have different code, which checks the stack and then does the
    same.
    """
    with contextlib.ExitStack() as at_end:
        for function in _functions(answer):
            at_end.callback(setattr, function, "__code__", function.__code__)
            at_end.callback(setattr, function, "__dict__", vars(function).copy())
            function.__signature__ = inspect.signature(function)
            function.__code__ = _watching(function, answer)
        yield


def _watching(function, answer):
    """Return code to replace that of `function`, with the same file and line."""
    as_it_was = types.FunctionType(function.__code__, function.__globals__, function.__name__,
                                   function.__defaults__, function.__closure__)
    as_it_was.__kwdefaults__ = function.__kwdefaults__

    def see(*args, **kwargs):
        if _is_of_learner(sys._getframe(1), type(args[0]) if args else object, answer):
            raise LibrarysAnswer(answer.__name__)
        return as_it_was(*args, **kwargs)

    def instead(*args, **kwargs):
        see = "see"  # a constant of the code, since its global names are those of `function`
        return see(*args, **kwargs)

    code, old = instead.__code__, function.__code__
    # Python 3.13 warns where code of another kind comes in. Of a generator it has the flag alone,
    # not the instruction that makes one: so a call still looks at the stack at once.
    return code.replace(
        co_flags=code.co_flags | old.co_flags & inspect.CO_GENERATOR,
        co_consts=tuple(see if each == "see" else each for each in code.co_consts),
        co_freevars=old.co_freevars, co_name=old.co_name, co_filename=old.co_filename,
        co_firstlineno=old.co_firstlineno)


def _functions(answer):
    parts = vars(answer).values() if isinstance(answer, type) else [answer]
    parts = [inspect.unwrap(getattr(part, "__func__", part)) for part in parts if callable(part)
             or hasattr(part, "__func__")]
    return [part for part in parts if inspect.isfunction(part)]


def _is_of_learner(frame, kind, answer):
    """Return False if library code calls, itself called by the check or by nobody."""
    if isinstance(answer, type) and _is_theirs(kind, answer):
        return True
    by_library = False
    while frame := frame.f_back:
        file = frame.f_code.co_filename
        if file == __file__:
            continue
        if file.startswith(CHECKS):
            break
        if not file.startswith((PACKAGE, *LIBRARIES, *NO_FILE)):
            return True
        by_library |= file.startswith(PACKAGE) and not file.startswith(ENGINE)
    return not by_library


def _is_theirs(kind, answer):
    """Return True for a class that the learner derived from `answer`."""
    return (issubclass(kind, answer) and kind is not answer
            and not kind.__module__.startswith("ranklab."))
