"""A program that somebody names on a command line, as a file or as a module."""

import sys
from importlib.util import find_spec
from pathlib import Path


def words_of(program, alternative):
    """Return the arguments with which Python runs this program: a file, or a module.

    The module may also be in this folder.
    Raises: ValueError if it is neither; `alternative` says what else the caller would have taken
    """
    if program.endswith(".py") and Path(program).is_file():
        return [program]
    sys.path.insert(0, "")  # as `python -m` does, and a console script does not
    try:
        if find_spec(program) is not None:
            return ["-m", program]
    except (ImportError, ValueError, AttributeError):
        pass
    finally:
        sys.path.pop(0)
    raise ValueError(f"{program!r} is no module, {alternative}")
