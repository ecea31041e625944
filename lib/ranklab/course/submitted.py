"""What the text of a submitted notebook says. Nothing is run."""

import ast
import inspect
import json
import re
import textwrap

from ranklab.course import labs
from ranklab.course.check import LIBRARYS, NOT_WRITTEN


class Unreadable(ValueError):
    """The file is not a notebook; the message says why."""


class Notebook:
    """A notebook's code cells, and the lab they belong to.

    error  Unreadable
    """

    def __init__(self, path):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            self.cells = ["".join(cell["source"]) for cell in content["cells"]
                          if cell["cell_type"] == "code"]
            stem = content.get("metadata", {}).get("ranklab", {}).get("stem")
        except (ValueError, RecursionError):
            raise Unreadable("it is not JSON") from None
        except (KeyError, TypeError, AttributeError):
            raise Unreadable("it has no cells as notebooks have them") from None
        except OSError as error:
            raise Unreadable(error.strerror or str(error)) from None
        self.text = "\n".join(self.cells)
        self.trees = [_tree(cell) for cell in self.cells]
        self.stem = stem if stem in labs.written() else self._likely_stem()

    def _likely_stem(self):
        """The lab whose names the notebook mentions most often; None if it mentions none."""
        found = set(re.findall(r"\w+", self.text))
        counts = {stem: len(found & set(names_of(stem))) for stem in labs.written()}
        best = max(counts, key=counts.get, default=None)
        return best if counts.get(best) else None

    def cells_to_run(self):
        """The code cells up to the last one that defines an exercise."""
        names = {exercise.name for exercise in labs.checks_of(self.stem).EXERCISES}
        last = [n for n, cell in enumerate(self.cells, 1) if names & set(definitions(cell))][-1:]
        return self.cells[: sum(last)]

    def predictions(self):
        """The text of each number that was predicted: the last one that is not `...`."""
        wanted = {item.name for item in labs.checks_of(self.stem).PREDICTIONS}
        found = {}
        for call in (node for tree in self.trees for node in ast.walk(tree)):
            function = getattr(call, "func", None)  # check(...), or ranklab.check(...)
            if "check" in (getattr(function, "id", ""), getattr(function, "attr", "")):
                for keyword in call.keywords:
                    text = ast.unparse(keyword.value)
                    if keyword.arg in wanted and text not in ("...", "None"):
                        found[keyword.arg] = text
        return found

    def why_missing(self, name):
        """(state, reason) of what could not be had from the notebook."""
        if any(name == prediction.name for prediction in labs.checks_of(self.stem).PREDICTIONS):
            return NOT_WRITTEN, ""
        if name in definitions(self.text):
            return NOT_WRITTEN, "its cell was not reached, or failed"
        if not re.search(rf"\b{name}\b", self.text):
            return NOT_WRITTEN, "it is not in the notebook"
        if re.search(rf"^\s*(from\s+ranklab\b.*\b{name}\b|{name}\s*=)", self.text, re.M):
            return LIBRARYS, "the notebook does not define it"
        return NOT_WRITTEN, ""

    def is_copied(self, exercise):
        """True when the last definition is the library's, but for comments and docstring."""
        own = [node for tree in self.trees for node in tree.body
               if getattr(node, "name", None) == exercise.name]
        answer = ast.parse(textwrap.dedent(inspect.getsource(exercise.answer))).body
        return [_bare(node) for node in own[-1:]] == [_bare(node) for node in answer]


def names_of(stem):
    """The lab's exercises, then its predictions."""
    checks = labs.checks_of(stem)
    return [item.name for item in (*checks.EXERCISES, *checks.PREDICTIONS)]


def definitions(source):
    """The names of all functions and classes in it, also where it is not quite Python."""
    return re.findall(r"^[ \t]*(?:async +)?(?:def|class)[ \t]+(\w+)", source, re.M)


def _tree(source):
    """The cell's syntax tree, magics and shell lines left out; empty where it is no Python."""
    try:
        return ast.parse(re.sub(r"^([ \t]*)[%!?].*", r"\1pass", source, flags=re.M))
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _bare(node):
    """The definition as text, without docstrings and comments."""
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(part):
            part.body = part.body[1:]
    return ast.dump(node)
