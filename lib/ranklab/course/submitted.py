"""What a submitted notebook says, and the .py files beside it. Nothing is run."""

import ast
import builtins
import functools
import inspect
import itertools
import json
import re
import textwrap

from ranklab.course import labs
from ranklab.course.check import LIBRARYS, NOT_WRITTEN
from ranklab.course.names import bound_names, free_names
from ranklab.course.predicted import predictions

LARGEST = 100_000_000  # bytes of a notebook; and a hundredth of it of a file beside it
FEW = 4  # lines that a short answer shares with the library by chance
# No answer needs these: they reach hidden code, the library's files, other frames, or the grader.
TRICKS = re.compile(r"\b(?:runpy|exec_module|spec_from_file_location|__code__|__globals__|"
                    r"__builtins__|__subclasses__|_getframe|currentframe|f_back|f_locals|tb_frame|"
                    r"get_objects|get_referrers|ctypes|marshal|cloudpickle|pickle|CodeType|"
                    r"FunctionType|regrade|ranklab\.course|ranklab\.checks|sys\.path|__file__|"
                    r"__path__|setprofile|settrace|Interactive(?:Interpreter|Console|Shell)|"
                    r"SourceFileLoader|codeop)\b"
                    r"|(?<![.\w])(?:exec|eval|compile|__import__)(?=\()")


class Unreadable(ValueError):
    """The file is not a notebook; the message says why."""


class Notebook:
    """A notebook's code cells, and the lab they belong to.

    error  Unreadable
    """

    def __init__(self, path):
        try:
            content = json.loads(_read(path, LARGEST).decode())
            self.cells = ["".join(cell["source"]) for cell in content["cells"]
                          if cell["cell_type"] == "code"]
            stem = content.get("metadata", {}).get("ranklab", {}).get("stem")
        except Unreadable:
            raise
        except (ValueError, RecursionError):
            raise Unreadable("it is not JSON") from None
        except (KeyError, TypeError, AttributeError):
            raise Unreadable("it has no cells as notebooks have them") from None
        self.beside = dict(_files_beside(path))
        self.text = "\n".join(self.cells)
        self.trees = [_tree(cell) for cell in self.cells]
        self.stem = stem if stem in (*labs.written(), labs.TOUR) else self._likely_stem()

    def _likely_stem(self):
        """The lab whose names the notebook mentions most often; None if it mentions none."""
        found = set(re.findall(r"\w+", self.text))
        counts = {stem: len(found & set(labs.names_of(stem))) for stem in labs.written()}
        best = max(counts, key=counts.get, default=None)
        return best if counts.get(best) else None

    def cells_to_run(self):
        """[(number, source)]: all up to the last that defines an exercise, and what these need.

        A later cell is needed when it binds a name that they use and do not bind.
        """
        names = {exercise.name for exercise in labs.checks_of(self.stem).EXERCISES}
        last = [n for n, cell in enumerate(self.cells, 1) if names & set(definitions(cell))][-1:]
        texts = [ast.unparse(tree) for tree in self.trees]
        run, new, missing = set(), set(range(sum(last))), set()
        while new:
            run |= new
            missing |= set().union(*(free_names(texts[number]) for number in new))
            missing -= set(dir(builtins)).union(*(bound_names(texts[number]) for number in run))
            new = {number for number, text in enumerate(texts)
                   if number not in run and bound_names(text) & missing}
        return [(number + 1, self.cells[number]) for number in sorted(run)]

    def predictions(self):
        """{name: (text, value)} of the numbers that were predicted."""
        wanted = {item.name for item in labs.checks_of(self.stem).PREDICTIONS}
        return predictions(self.trees, wanted)

    def why_missing(self, name):
        """(state, reason) of an answer that could not be taken from the notebook."""
        if any(name == prediction.name for prediction in labs.checks_of(self.stem).PREDICTIONS):
            return NOT_WRITTEN, ""
        if name in definitions(self.text):
            return NOT_WRITTEN, "its cell was not reached, or failed"
        if not re.search(rf"\b{name}\b", self.text):
            return NOT_WRITTEN, "it is not in the notebook"
        if re.search(rf"^\s*(from\s+ranklab\b.*\b{name}\b|{name}\s*=)", self.text, re.M):
            return LIBRARYS, "the notebook does not define it"
        return NOT_WRITTEN, ""

    def tricks(self):
        """The words in its code that no answer needs, in order."""
        texts = [self.text, *(data.decode(errors="replace") for data in self.beside.values())]
        return list(dict.fromkeys(TRICKS.findall("\n".join(texts))))

    @functools.cached_property
    def untouched(self):
        """The exercises whose every definition is the lab's stub, which may be code that runs."""
        stubs = _stubs(self.stem)
        texts = {exercise.name: set() for exercise in labs.checks_of(self.stem).EXERCISES}
        for node in itertools.chain.from_iterable(tree.body for tree in self.trees):
            if getattr(node, "name", None) in texts:
                texts[node.name].add(_bare(node))
        return {name for name in texts if texts[name] == {stubs.get(name)}}

    def has_library_text(self, exercise):
        """True when the last definition, or one in a file beside the notebook, is the library's,
        but for comments and docstring.
        """
        own = [node for tree in self.trees for node in tree.body
               if getattr(node, "name", None) == exercise.name]
        beside = [node for data in self.beside.values()
                  for node in _tree(data.decode(errors="replace")).body if hasattr(node, "name")]
        answer = _bare(_answer(exercise))
        return any(_bare(node) == answer for node in [*own[-1:], *beside])


def is_forced(exercise, stem):
    """True when the stub leaves so little to write that many learners write the same."""
    given = {line.strip() for line in _stubs(stem).get(exercise.name, "").splitlines()}
    lines = [line.strip() for line in _bare(_answer(exercise)).splitlines()[1:]]
    return len([line for line in lines if line not in given]) <= FEW


def _stubs(stem):
    """{name: text} of all that the lab's source defines, without comments and docstrings; {} where
    the lab is not here.
    """
    root = labs.repository(__file__) or labs.repository()
    source = root and root / "labs" / "source" / f"{stem}.py"
    tree = _tree(source.read_text()) if source and source.exists() else ast.Module([], [])
    return {node.name: _bare(node) for node in reversed(tree.body) if hasattr(node, "name")}


def has_code_of(exercise, pickled):
    """True when the pickle holds the answer's own bytecode, however it got there."""
    answer = exercise.answer
    parts = vars(answer).values() if isinstance(answer, type) else [answer]
    codes = [getattr(inspect.unwrap(getattr(part, "__func__", part)), "__code__", None)
             for part in parts if callable(part) or hasattr(part, "__func__")]
    codes = [code for code in codes if code]
    return bool(codes) and all(
        code.co_code in pickled and all(name.encode() in pickled for name in
                                        (*code.co_names, *code.co_varnames)) for code in codes)


def definitions(source):
    """The names of all functions and classes in it, also where it is not quite Python."""
    return re.findall(r"^[ \t]*(?:async +)?(?:def|class)[ \t]+(\w+)", source, re.M)


def _read(path, largest):
    try:
        if not path.is_file():  # a FIFO would wait forever
            raise Unreadable("it is a link that leads nowhere" if path.is_symlink()
                             else "it is not a file")
        if (size := path.stat().st_size) > largest:
            raise Unreadable(f"it has {size:,} bytes, at most {largest:,} are read")
        return path.read_bytes()
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from None


def _files_beside(path):
    """(name, content) of each .py file in the notebook's folder."""
    for file in sorted(path.parent.glob("*.py")):
        try:
            yield file.name, _read(file, LARGEST // 100)
        except Unreadable:
            pass  # an import of it will say so


def _tree(source):
    """The cell's syntax tree, magics and shell lines left out; empty where it is no Python."""
    try:
        tree = ast.parse(re.sub(r"^([ \t]*)[%!?].*", r"\1pass", source, flags=re.M))
        bound_names(ast.unparse(tree))  # a `yield` outside of a function is found only here
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
