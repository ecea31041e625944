"""Case: an incident of the clinic. A mended program, and the edits that make it the broken one."""

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from ranklab.basics.edits import edited_text


@dataclass(frozen=True)
class Case:
    """A program that misbehaves, with its mend and the causes to choose from.

    program  the mended one, the library's answer: a function that each rank calls, with group=None
    edits    (mended text, broken text) pairs: the program as it was found, the stub of the lab
    hidden   pairs for the same disease at another place, for `diagnose`
    causes   sentences to choose from, the right one first; the lab shows them sorted by their text
    disease  the name that `ranklab diagnose` gives to it
    """

    program: Callable
    edits: tuple[tuple[str, str], ...]
    hidden: tuple[tuple[str, str], ...]
    causes: tuple[str, ...]
    disease: str

    @property
    def name(self):
        return self.program.__name__

    @property
    def choices(self):
        """The causes as the lab shows them, numbered from 1."""
        return sorted(self.causes)

    @property
    def cause(self):
        """The number of the right one."""
        return self.choices.index(self.causes[0]) + 1

    def broken_source(self):
        """Return the text of the program as it was found."""
        return edited_source(self.program, self.edits)

    def is_as_found(self, program):
        """Return whether only name, comments and empty lines differ; False for an unknown text."""
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(program)))
            tree.body[0].name = self.name
            return ast.dump(tree) == ast.dump(ast.parse(self.broken_source()))
        except (AttributeError, OSError, TypeError, SyntaxError):
            return False

    def broken(self):
        """Return the program as it was found, as a function."""
        return compiled_program(self.program, self.broken_source())

    def variant(self):
        """Return the hidden program, as a function."""
        return edited_program(self.program, self.hidden)


def edited_program(program, edits):
    """Return a copy of the function with these edits, also where there are none."""
    return compiled_program(program, edited_source(program, edits))


def edited_source(program, edits):
    """Return the source of `program` with these (old, new) pairs; each old text must be there once.
    """
    return edited_text(program, sum(edits, ()))


def compiled_program(program, source):
    """Return the function that `source` defines, with the names of the program's module."""
    name = f"<{program.__name__} {hash(source) % 1000}>"  # not two alike: tracebacks show its lines
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    namespace = dict(vars(inspect.getmodule(program)), __name__="__main__")
    exec(compile(source, name, "exec"), namespace)
    return namespace[program.__name__]
