"""The text of a submitted notebook, and of the .py files next to it. Nothing is run."""

import ast
import functools
import inspect
import json
import re
import textwrap

from ranklab.course import labs
from ranklab.course.check import LIBRARYS, NOT_WRITTEN
from ranklab.basics.names import bound_names

FEW = 4  # lines that a short answer shares with the library by chance


class Unreadable(ValueError):
    """The file is not a notebook; the message says why."""


class Notebook:
    """A notebook's code cells, and the lab they belong to.

    Raises Unreadable.
    """

    def __init__(self, path):
        try:
            if not path.is_file():  # a FIFO would wait forever
                raise Unreadable("it is a link that leads nowhere" if path.is_symlink()
                                 else "it is not a file")
            content = json.loads(path.read_text(encoding="utf-8"))
            self.cells = ["".join(cell["source"]) for cell in content["cells"]
                          if cell["cell_type"] == "code"]
            stem = content.get("metadata", {}).get("ranklab", {}).get("stem")
            self.files_beside = {file.name: file.read_bytes() for file in path.parent.glob("*.py")}
        except OSError as error:
            raise Unreadable(error.strerror or str(error)) from None
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
            raise Unreadable("it is not JSON") from None
        except (KeyError, TypeError, AttributeError):
            raise Unreadable("it has no cells as notebooks have them") from None
        self.text = "\n".join(self.cells)
        self.stem = stem if stem in (*labs.written(), labs.TOUR) else self._likely_stem()

    def _likely_stem(self):
        """The lab whose names the notebook mentions most often; None if it mentions none."""
        words = set(re.findall(r"\w+", self.text))
        counts = {stem: len(words & set(labs.names_of(stem))) for stem in labs.written()}
        best = max(counts, key=counts.get, default=None)
        return best if counts.get(best) else None

    @functools.cached_property
    def sources(self):
        """{exercise: the text of its last definition}"""
        return {name: ast.unparse(nodes[-1]) for name, nodes in self._nodes.items() if nodes}

    @functools.cached_property
    def _nodes(self):
        """{exercise: the syntax trees of its definitions at the top level of a cell}"""
        nodes = {exercise.name: [] for exercise in labs.checks_of(self.stem).EXERCISES}
        for node in (node for cell in self.cells for node in _tree(cell).body):
            if getattr(node, "name", None) in nodes:
                nodes[node.name].append(node)
        return nodes

    def why_missing(self, name):
        """Return (state, reason) of an answer that `check` has not recorded."""
        if any(name == prediction.name for prediction in labs.checks_of(self.stem).PREDICTIONS):
            return NOT_WRITTEN, ""
        if name in definitions(self.text):
            return NOT_WRITTEN, "its cell failed"
        if not re.search(rf"\b{name}\b", self.text):
            return NOT_WRITTEN, "it is not in the notebook"
        if re.search(rf"^\s*(from\s+ranklab\b.*\b{name}\b|{name}\s*=)", self.text, re.M):
            return LIBRARYS, "the notebook does not define it"
        return NOT_WRITTEN, ""

    @functools.cached_property
    def untouched(self):
        """The exercises whose every definition is the lab's stub, which may be code that runs."""
        stubs = _stubs(self.stem)
        return {name for name, nodes in self._nodes.items()
                if {_bare(node) for node in nodes} == {stubs.get(name)}}

    def has_library_text(self, exercise):
        """Return whether the last definition is the library's text, without comments, docstrings
        and annotations; False if the stub leaves at most FEW lines to write.
        """
        nodes, answer = self._nodes[exercise.name], _bare(_answer(exercise))
        return bool(nodes) and _bare(nodes[-1]) == answer and not is_forced(exercise, self.stem)


def is_forced(exercise, stem):
    """Return whether the stub leaves so little to write that many learners write the same."""
    stub_lines = {line.strip() for line in _stubs(stem).get(exercise.name, "").splitlines()}
    lines = [line.strip() for line in _bare(_answer(exercise)).splitlines()[1:]]
    return len([line for line in lines if line not in stub_lines]) <= FEW


def _stubs(stem):
    """Return {name: text} of all definitions in the lab's source, without comments and
    docstrings; {} if the lab is not here.
    """
    root = labs.repository(__file__) or labs.repository()
    source = root and root / "labs" / "source" / f"{stem}.py"
    tree = _tree(source.read_text()) if source and source.exists() else ast.Module([], [])
    return {node.name: _bare(node) for node in reversed(tree.body) if hasattr(node, "name")}


def definitions(source):
    """Find the names of all functions and classes, even if `source` is not quite Python."""
    return re.findall(r"^[ \t]*(?:async +)?(?:def|class)[ \t]+(\w+)", source, re.M)


def _tree(source):
    """Parse the cell without magics and shell lines; return an empty tree if it is not Python."""
    try:
        tree = ast.parse(re.sub(r"^([ \t]*)[%!?].*", r"\1pass", source, flags=re.M))
        bound_names(ast.unparse(tree))  # a `yield` outside a function is found only here
        return tree
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _answer(exercise):
    return ast.parse(textwrap.dedent(inspect.getsource(exercise.answer))).body[0]


def _bare(node):
    """The definition as text, without docstrings, comments and annotations."""
    node = ast.parse(ast.unparse(node)).body[0]
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(part):
            part.body = part.body[1:]
        if isinstance(part, ast.FunctionDef):
            part.returns = None
        if isinstance(part, ast.arg):
            part.annotation = None
    return ast.unparse(node)
