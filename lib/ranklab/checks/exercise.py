"""What a check is made of. checks/<idea>.py holds the exercises and predictions of one lab.

A check is a generator: it yields one sentence for each property that holds, and raises Mistake at
the first that does not. It compares with an oracle that is not the code under test.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

KEEP = "Keep the parameters of the stub, with their names and defaults."


class Mistake(Exception):
    """A property does not hold: what is seen, and a hint about this very mistake.

    cause  the exception, the end of a rank or the hang, where that is all (failures.py)
    rank   the rank that ended with it
    case   the number of the case in which it broke
    """

    def __init__(self, what, hint="", cause="", rank=None, case=None):
        super().__init__(what)
        self.what, self.hint, self.cause, self.rank, self.case = what, hint, cause, rank, case


@dataclass(frozen=True)
class Exercise:
    """A function or class for the learner to write; `answer` is the library's, of the same name.

    mistakes  Slips (prover/slips.py): the check refuses each, and says its sentence
    """

    answer: Callable
    check: Callable[[Callable], Iterator[str]]
    hints: tuple[str, str, str]
    mistakes: tuple = ()

    @property
    def name(self):
        return self.answer.__name__

    @property
    def module(self):
        """Return the name of the module in which its check is written."""
        return self.check.__module__


def shown(number, digits=6):
    """Format a number to be read: 1,048,576 and not 1.04858e+06."""
    is_long = 1e5 <= abs(number) < 1e15 and (number == round(number) or digits < 10)
    return f"{number:,.0f}" if is_long else f"{number:.{digits}g}"


@dataclass(frozen=True)
class Prediction:
    """A number for the learner to predict before the code runs.

    solution  how one gets it, as an expression
    answer    the same number from the library, so that it can't rot
    mistakes  usual wrong numbers, each with what it confuses
    hint      the first one: what to think of, not what to compute
    """

    name: str
    solution: str
    answer: Callable[[], float]
    unit: str = ""
    mistakes: dict[float, str] | None = None
    why: str = ""
    tolerance: float = 0.01
    hint: str = ""

    @property
    def hints(self):
        """A hint, a usual mistake, and the solution last: one more each time the learner asks."""
        unit = f" {self.unit}" if self.unit else ""
        mistakes = [f"A usual slip is {shown(wrong)}{unit}: {confusion}"
                    for wrong, confusion in (self.mistakes or {}).items()][:1]
        answer = shown(self.answer())
        solution = f"{self.solution} = " if self.solution != answer else ""
        return tuple(filter(None, (self.hint, *mistakes, f"{solution}{answer}{unit}")))


# --- the signature is that of the stub ------------------------------------------------------------

def refuse_signature(answer, learner):
    """Raise a Mistake where `learner`, or a method of it, can't be called as the library's answer.

    Required parameters may have other names: they are given in order. Parameters with defaults are
    given by name. More of them are right, and so are *args and **kwargs in their place.
    """
    for name, stub, own in _signatures(answer, learner):
        kinds = {each.kind for each in own.parameters.values()}
        parameters = [each for each in stub.parameters.values() if "VAR_" not in each.kind.name]
        optional = [each.name for each in parameters if each.default is not each.empty]
        lacks = [each for each in optional if each not in own.parameters]
        if lacks and not {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL} & kinds:
            raise Mistake(f"{name}{own} has no parameter called {lacks[0]}; the stub is "
                          f"{name}{stub}", KEEP)
        try:
            own.bind(*range(len(parameters) - len(optional)),
                     **{each: None for each in optional if each not in lacks})
        except TypeError as error:
            raise Mistake(f"{name}{own} can't be called like the stub, {name}{stub}: {error}",
                          KEEP) from None


def tell_signature(answer, learner, mistake):
    """Give `mistake` a hint about the signature, where that is why it could not be called."""
    wrong_call = rf"\b{answer.__name__}(\.\w+)?\(\) (got an unexpected|missing \d|takes )"
    if re.search(wrong_call, mistake.what):
        differ = [f"{name}{stub}" for name, stub, own in _signatures(answer, learner)
                  if list(stub.parameters) != list(own.parameters)]
        mistake.hint = f"The stub is {', '.join(differ)}. {KEEP}" if differ else mistake.hint


def _signatures(answer, learner):
    """(name, the library's signature, the learner's) of a function, or of a class's methods."""
    pairs = {answer.__name__: (answer, learner)}
    if isinstance(answer, type):
        pairs |= {f"{answer.__name__}.{name}": (getattr(answer, name), getattr(learner, name, None))
                  for name, method in vars(answer).items() if not name.startswith("_")
                  and (inspect.isroutine(method) or isinstance(method, staticmethod))}
    for name, (stub, own) in pairs.items():
        try:
            yield name, _plain(inspect.signature(stub)), _plain(inspect.signature(own))
        except (TypeError, ValueError):  # the learner has no such method; or it has no signature
            continue


def _plain(signature):
    """Without annotations: they say nothing about how it is called."""
    return signature.replace(return_annotation=signature.empty, parameters=[
        each.replace(annotation=each.empty) for each in signature.parameters.values()])
