"""ranklab: distributed training from one GPU to 3D parallelism, in labs that run real ranks.

The names below are all that a lab's first cell needs. They load on first use, so `import ranklab`
is instant and imports neither torch nor matplotlib.
"""

import importlib

from ranklab import moved

__version__ = "1.0.0"  # CHANGELOG.md says how versions are counted
_HOME_OF = {
    "launch": "ranklab.engine",
    "device": "ranklab.engine",
    "RankError": "ranklab.engine",
    "HangError": "ranklab.engine",
    "check": "ranklab.course.check",
    "hint": "ranklab.course.hint",
    "answer": "ranklab.course.hint",
    "questions": "ranklab.course.questions",
    "begin": "ranklab.course.begin",
    "catch_up": "ranklab.course.begin",
    "status": "ranklab.course.begin",
    "passed_answers": "ranklab.course.passed_answers",
}
__all__ = list(_HOME_OF)


def __getattr__(name):
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ranklab' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


moved.install()


def load_ipython_extension(shell):
    """`%load_ext ranklab`: a cell that begins with `%%ranks 4` runs on four fresh ranks."""
    from ranklab.magic import register

    register(shell)
