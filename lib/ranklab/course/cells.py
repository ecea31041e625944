"""The code cells of a lab, and the statements in them that bind what a later cell uses."""

import ast
import contextlib
import functools
import inspect
import json
import linecache
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from ranklab.course import labs
from ranklab.basics.names import bound_names, free_names

FENCED = re.compile(r"^```.*?^```", re.M | re.S)  # a comment in it is no heading
HEADING = re.compile(r"^(#{1,6}) (.+)", re.M)
LARGEST = 100_000  # bytes of a cell that is kept
COMPOUND = (ast.For, ast.While, ast.If, ast.With, ast.Try)
IMPORTS = (ast.Import, ast.ImportFrom)
DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Statement:
    """A statement at the top level of a cell.

    binds    the names that it binds
    changes  the names whose objects it changes: x[0] = 1, x.append(1)
    uses     the names that it needs when it runs
    late     the names that it needs when a function that it defines is called
    checks   the names that it gives to check: check(x)
    answers  the exercise that it answers; "" if none
    node     None where the answer is the library's
    text     its cell's text, for tracebacks; cell: the cell's number in the lab
    """

    binds: frozenset
    changes: frozenset = frozenset()
    uses: frozenset = frozenset()
    late: frozenset = frozenset()
    checks: frozenset = frozenset()
    answers: str = ""
    node: ast.stmt | None = None
    text: str = ""
    cell: int = -1

    @property
    def keeps(self):
        """True where the names that it binds may keep their earlier values."""
        return isinstance(self.node, (*COMPOUND, ast.AugAssign))


@dataclass(frozen=True)
class Cell:
    """A code cell. headings: the titles above it, the nearest last."""

    id: str
    source: str
    headings: tuple[str, ...] = ()

    @functools.cached_property
    def statements(self):
        """Its statements; none where it is not valid Python."""
        return statements_of(self.source)

    @property
    def defines(self):
        """The names of the functions and classes that it defines."""
        return {one.node.name for one in self.statements if isinstance(one.node, DEFINES)}


def statements_of(source):
    """Parse a cell's text into its statements; return none where it is not valid Python."""
    try:
        return [_statement(node, source) for node in _tree(source).body]
    except (SyntaxError, ValueError):
        return []


def _tree(source):
    """Parse the source. Magics and shell lines are left out; a `%%ranks` body is Python."""
    source = re.sub(r"\A%%ranks\b.*", "pass", source)
    return ast.parse(re.sub(r"^([ \t]*)[%!?].*", r"\1pass", source, flags=re.M))


def _statement(node, source):
    text = ast.unparse(node)
    binds, uses = bound_names(text), free_names(text)
    late = uses if isinstance(node, DEFINES) else set()
    if not isinstance(node, (*COMPOUND, *DEFINES)):  # x = x + 1 needs x
        uses |= {each.id for each in _here(node) if isinstance(each, ast.Name)
                 and (isinstance(each.ctx, ast.Load) or isinstance(node, ast.AugAssign))}
    return Statement(frozenset(binds), frozenset(_changes(node)), frozenset(uses), frozenset(late),
                     frozenset(_checks(node)), node=node, text=source)


def _here(node):
    """Yield the nodes below `node` that run with it: none inside functions or comprehensions."""
    yield node
    inner = (*DEFINES, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, inner):
            yield from _here(child)


def _changes(node):
    for each in () if isinstance(node, DEFINES) else _here(node):
        stored = isinstance(getattr(each, "ctx", None), (ast.Store, ast.Del))
        if isinstance(each, (ast.Subscript, ast.Attribute)) and stored:
            yield _root(each)
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call):
            if isinstance(each.value.func, ast.Attribute):
                yield _root(each.value.func)


def _checks(node):
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and getattr(each.func, "id", "") == "check":
            yield from (argument.id for argument in each.args if isinstance(argument, ast.Name))


def _root(node):
    """The name at the start of x[0].y; "" where there is none."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")


def needs(statements):
    """Find the names that must be bound before these statements run in order."""
    names, late, bound = set(), set(), set()
    for one in reversed(statements):
        if not one.keeps:
            names -= one.binds
        names |= one.uses - one.late
        late |= one.late
        bound |= one.binds
    return names | late - bound


def to_bind(names, statements, is_there):
    """Select from `statements`, in order, those that bind `names` and those that these need.

    is_there(name, cell): True where `name` already has what the last statement above, in the cell
                          of this number, binds to it
    """
    imported = _imported(statements)
    late, rebound_names = set(), set()
    while True:
        targets, selection = set(names) | late, []
        for index in reversed(range(len(statements))):
            one = statements[index]
            if not (one.binds & targets or (one.changes - imported) & targets):
                continue
            selection.insert(0, one)
            if not one.keeps:
                targets -= one.binds
            targets |= {name for name in one.uses | one.changes if name and (
                name in rebound_names or not is_there(name, _binder(name, statements[:index])))}
        # A function may need what is bound only after it, and what is bound again here is no longer
        # what was there.
        late_names = {name for one in selection for name in one.late
                      if name in rebound_names or not is_there(name, _binder(name, statements))}
        bound = {name for one in selection for name in one.binds}
        if late_names <= late and bound <= rebound_names:
            return selection
        late |= late_names
        rebound_names |= bound


def _binder(name, statements):
    """Return the cell number of the last statement that binds `name`; None where none does."""
    return next((one.cell for one in reversed(statements) if name in one.binds), None)


def _imported(statements):
    """Return the imported modules: calls on them change nothing that a slice must repeat."""
    return {name for one in statements for name in one.binds
            if isinstance(one.node, IMPORTS)}


class Lab:
    """The code cells of one lab, in order."""

    def __init__(self, stem, cells):
        self.stem, self.cells = stem, cells
        self.exercises = {each.name: each for each in labs.checks_of(stem).EXERCISES}

    def place_of(self, source, cell_id, last):
        """Find the cell with this text, the next after the cell `last` if several have it.

        An edited cell is known by its id, or by what it defines.
        Returns: the cell's number; None if no cell has this text
        """
        statements = statements_of(source)
        defines = {one.node.name for one in statements if isinstance(one.node, DEFINES)}
        tests = (lambda cell: cell.id == cell_id and cell_id,
                 lambda cell: cell.source.strip() == source.strip(),
                 lambda cell: defines & cell.defines)
        for is_it in tests:
            places = [number for number, cell in enumerate(self.cells) if is_it(cell)]
            if places:
                return next((number for number in places if number > last), places[-1])
        return None

    def find(self, place):
        """Find the first cell under "4.4", or under the heading of an exercise or a prediction.

        Returns: the cell's number, or None
        """
        predicted = re.compile(rf"check\([^)]*\b{re.escape(place)}\s*=")
        for number, cell in enumerate(self.cells):
            title = cell.headings[-1] if cell.headings else ""
            if (place in (title, title.split(" ")[0].rstrip("."), *cell.defines)
                    or predicted.search(cell.source)):
                return next(n for n, one in enumerate(self.cells) if one.headings == cell.headings)
        return None

    def section(self, number):
        """Return the cells from `number` on that are under the same heading."""
        end = number
        while end < len(self.cells) and self.cells[end].headings == self.cells[number].headings:
            end += 1
        return self.cells[number:end]

    def binder(self, name, until):
        """Find the last cell before `until` that defines `name`, rather than only importing it.

        Returns: the cell's number; None where no cell does
        """
        numbers = (number for number in reversed(range(until))
                   for one in self.cells[number].statements
                   if name in one.binds and not isinstance(one.node, IMPORTS))
        return next(numbers, None)

    def statements(self, until, texts=None):
        """Return the statements of all cells before the cell `until`.

        An exercise's answer is from `texts`, {name: the text of the learner's cell}, or else from
        the library. Statements such as `x = check(x)` are left out.
        """
        statements = []
        for number, cell in enumerate(self.cells[:until]):
            for one in cell.statements:
                name = getattr(one.node, "name", "")
                if name in self.exercises and isinstance(one.node, DEFINES):
                    answer = self._answer(name, (texts or {}).get(name, ""))
                else:
                    answer = [] if _is_check(one.node, self.exercises) else [one]
                statements += [replace(each, cell=number) for each in answer]
        return statements

    def _answer(self, name, text):
        """Return the learner's definition with the rest of its cell, or the library's answer."""
        statements = [one for one in statements_of(text) if not _is_check(one.node, self.exercises)
                      and getattr(one.node, "name", name) not in self.exercises.keys() - {name}]
        if not any(name in one.binds for one in statements):
            return [Statement(frozenset({name}), answers=name)]
        return [replace(one, answers=name) for one in statements]


def define(statements, space, exercises):
    """Run statements in the namespace `space`; return the exercises whose answer is the learner's.

    If a statement raises, the cell that needs it will report what is missing. If an answer
    raises, or has no statement, the library's answer is used.
    exercises: {name: Exercise} of the lab
    """
    failed = set()
    for one in statements:
        if one.node is None or one.answers in failed:
            space[one.answers] = exercises[one.answers].answer
            continue
        try:
            exec(_compiled(one), space)
        except Exception:
            if one.answers:
                failed.add(one.answers)
                space[one.answers] = exercises[one.answers].answer
    return {one.answers for one in statements if one.node and one.answers} - failed


def _compiled(statement):
    """Compile a statement so that tracebacks and text_of show its cell."""
    file = (f"<your cell of {statement.answers}>" if statement.answers else
            f"<code cell {statement.cell + 1} of the lab>")
    linecache.cache[file] = (len(statement.text), None, statement.text.splitlines(True), file)
    return compile(ast.Module([statement.node], []), file, "exec")


def text_of(learner_fn):
    """Return the text of the cell that defines a function or class; "" where no cell does."""
    parts = vars(learner_fn).values() if isinstance(learner_fn, type) else [learner_fn]
    for part in parts:
        part = getattr(part, "fget", getattr(part, "__func__", part))
        code = getattr(inspect.unwrap(part), "__code__", None) if callable(part) else None
        size, time, lines = (linecache.cache.get(code and code.co_filename, ()) + (0,) * 3)[:3]
        if lines and time is None and size < LARGEST:  # a file has a time
            return "".join(lines)
    return ""


def _is_check(node, exercises):
    """True for `x = check(x)`, `check(x)` and `check(number=3)`."""
    value = getattr(node, "value", None)
    is_call = isinstance(value, ast.Call) and getattr(value.func, "id", "") == "check"
    targets = getattr(node, "targets", ())
    return is_call and all(getattr(each, "id", "") in exercises for each in targets)


def find_lab(stem, notebook=None):
    """Find the lab `stem`: in the open notebook, the learner's copies, then the checkout's labs.

    Returns: the lab; None where there is none
    notebook: the file's path, where the editor says it
    """
    root = labs.repository() or labs.repository(Path(__file__).parent)
    paths = [notebook, os.environ.get("JPY_SESSION_NAME"), f"{stem}.ipynb",
             root and root / "work" / f"{stem}.ipynb", root and root / "labs" / f"{stem}.ipynb"]
    for path in filter(None, paths):
        with contextlib.suppress(OSError):
            lab = _read(path, os.stat(path).st_mtime_ns)
            if lab and lab.stem == stem:
                return lab
    return None


@functools.lru_cache(maxsize=4)
def _read(path, _time):
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return Lab(content["metadata"]["ranklab"]["stem"], list(_code_cells(content["cells"])))
    except (ValueError, LookupError, TypeError, AttributeError, ImportError):
        return None  # it is no notebook, or no lab's


def _code_cells(cells):
    path = {}
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            yield Cell(cell.get("id", ""), source, tuple(path[level] for level in sorted(path)))
            continue
        for level, title in headings(source) if cell["cell_type"] == "markdown" else ():
            path = {outer: name for outer, name in path.items() if outer < level} | {level: title}


def headings(text):
    """Find the headings of a Markdown cell: [(level, title), ...]."""
    return [(len(marks), title.strip()) for marks, title in HEADING.findall(FENCED.sub("", text))]
