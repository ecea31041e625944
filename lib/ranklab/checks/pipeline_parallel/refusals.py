"""Invalid arguments: each must raise a ValueError with a sentence."""

from typing import NamedTuple

from ranklab.checks.prover import Must, Stage

CHECK = "This can't be done. Check the numbers first, and raise ValueError(...) with a sentence."
SENTENCE = "The ValueError must say in a sentence what is wrong."
ASSERTED = "An assert raises AssertionError, and python -O drops it: raise ValueError(...)."


class Call(NamedTuple):
    name: str
    arguments: tuple

    def __str__(self):
        return f"{self.name}{self.arguments}"


def refusals(name, *cases):
    """Return the Stage for the function of this name: its cases are tuples of arguments."""
    return Stage("what can't be done is a ValueError, with a sentence", _see,
                 tuple(Call(name, arguments) for arguments in cases), note=CHECK)


def _see(fn, call):
    yield {"what it raises": Must(_error_of(fn, call.arguments), "a ValueError with a sentence")}


def _error_of(fn, arguments):
    try:
        fn(*arguments)
    except ValueError as error:
        return "a ValueError with" + "out" * (len(str(error).split()) < 2) + " a sentence"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
