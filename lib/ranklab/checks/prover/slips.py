"""Mistakes as functions: the text of the answer with edits, compiled as a notebook would."""

import inspect
from dataclasses import dataclass

from ranklab.basics.edits import edited_text
from ranklab.basics.names import free_names


@dataclass(frozen=True, init=False)
class Slip:
    """A mistake: the one sentence about it, and the programs that make it.

    programs  each (old, new, old, new, ...), edits of the answer whose old texts are there once; or
              a function of another idea
    names     what an edited text uses and the answer's module does not have
    """

    says: str
    programs: tuple
    names: dict

    def __init__(self, says, *programs, **names):
        for name, value in (("says", says), ("programs", programs), ("names", names)):
            object.__setattr__(self, name, value)

    def functions(self, answer):
        return [program if callable(program) else edited(answer, program, **self.names)
                for program in self.programs]


def edited(answer, edits=(), **names):
    """Return `answer` with its edits; a copy, also where there are none."""
    return compiled(answer, edited_text(answer, edits), **names)


def compiled(answer, source, **names):
    """Return what `source` defines, with what the lab's cells bind around it."""
    home = vars(inspect.getmodule(answer)) | names
    namespace = {"__name__": "__main__"}
    namespace |= {name: home[name] for name in free_names(source) if name in home}
    exec(compile(source, f"<the text of {answer.__name__}>", "exec"), namespace)
    return namespace[answer.__name__]
