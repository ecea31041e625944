"""A program that somebody names on a command line, as a file or as a module."""

import sys
from importlib.util import find_spec
from pathlib import Path


def words_of(what, others):
    """Return the arguments with which Python runs this program: a file, or a module.

    The module may also be in this folder.
    Raises: ValueError if it is neither; `others` says what else the caller would have taken
    """
    if what.endswith(".py") and Path(what).is_file():
        return [what]
    sys.path.insert(0, "")  # as `python -m` does, and a console script does not
    try:
        if find_spec(what) is not None:
            return ["-m", what]
    except (ImportError, ValueError, AttributeError):
        pass
    finally:
        sys.path.pop(0)
    raise ValueError(f"{what!r} is no module, {others}")
