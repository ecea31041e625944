"""Case: an incident of the clinic: a fixed program, and the edits that break it."""

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from ranklab.basics.edits import edited_text


@dataclass(frozen=True)
class Case:
    """A program that misbehaves, with its fix and the causes to choose from.

    program  the fixed one, the library's answer: a function that each rank calls, with group=None
    edits    (fixed text, broken text) pairs, which make the program as found, the lab's stub
    hidden   pairs for the same disease in a different place, for `diagnose`
    causes   sentences to choose from, the right one first; the lab shows them sorted by their text
    disease  the name of the disease in `ranklab diagnose`
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
        """The causes in the order of the lab, which numbers them from 1."""
        return sorted(self.causes)

    @property
    def cause(self):
        """The number of the right cause."""
        return self.choices.index(self.causes[0]) + 1

    def broken_source(self):
        """Return the text of the program as it was found."""
        return edited_source(self.program, self.edits)

    def is_as_found(self, program):
        """Return whether `program` is the one found, but for name, comments and empty lines.

        False if its text is unknown.
        """
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
    """Return a copy of the function with these edits, even if there are none."""
    return compiled_program(program, edited_source(program, edits))


def edited_source(program, edits):
    """Return the source of `program` with these (old, new) pairs; each old text must occur once."""
    return edited_text(program, sum(edits, ()))


def compiled_program(program, source):
    """Return the function defined by `source`, with the globals of the program's module."""
    name = f"<{program.__name__} {hash(source) % 1000}>"  # unique: tracebacks show its lines
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    namespace = dict(vars(inspect.getmodule(program)), __name__="__main__")
    exec(compile(source, name, "exec"), namespace)
    return namespace[program.__name__]
