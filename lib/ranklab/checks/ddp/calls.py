"""How the checks of this lab call a function that needs no ranks."""

import copy
import re

import torch

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Mistake


def called(where, failures, fn, given, **options):
    """fn(*given.values(), **options), which leaves {name: argument} as it was.

    failures  {regex of "Error: its message": hint}; other errors pass
    """
    before = copy.deepcopy(given)
    try:
        result = fn(*given.values(), **options)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        for pattern, hint in failures.items():
            if re.fullmatch(pattern, cause, re.S):
                raise Mistake(f"{where}: {cause}", hint) from None
        raise
    for name, value in given.items():
        same = torch.equal(value, before[name]) if isinstance(value, torch.Tensor) else \
            value == before[name]
        expect(same, f"{where}: `{name}` itself is changed", "Make a new one, and work on that.")
    return result


def refuses(fn, cases):
    """A ValueError for each of {what: arguments}."""
    for what, arguments in cases.items():
        raised = "no error"
        try:
            fn(*arguments)
        except Exception as error:
            raised = type(error).__name__
        expect(raised == "ValueError", f"{what} raises {raised}, not ValueError", "Keep the first "
               "lines of the stub: a call that makes no sense must raise, and not return a number.")
