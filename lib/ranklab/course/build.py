"""labs/ and solutions/ from labs/source/ and the library: one copy of each text and each answer.

    labs/NN_idea.ipynb        the source without the advice in its stubs, without outputs
    solutions/NN_idea.ipynb   the library's source in place of each stub, the working in place
                              of each `...`; executed, outputs kept. A broken program
                              stays, with its output; the fixed one follows below
    labs/tour.ipynb           the library's functions in place of those without a body;
                              executed, outputs kept. It has no solution: it has no exercises
    checks/prover/tables/     the observed behaviour of each known mistake

A cell's id comes from its text, so it stays when other cells change. The hash of all cells is
in the notebook's metadata: `ranklab build --check` compares and runs nothing.
"""

import ast
import builtins
import copy
import difflib
import inspect
import json
import os
import re
import textwrap
from pathlib import Path

import jupytext
import nbformat

from ranklab.basics.files import write_whole
from ranklab.checks.prover import Proof, tables
from ranklab.course import index_builder, labs
from ranklab.basics.names import bound_names, free_names
from ranklab.course.notebook import cells_hash, digest, plain, read_cells, run_cells
from ranklab.course.stubs import contract
from ranklab.projects import tour

COMPARED = "nbval-check-output"  # the tag of cells whose output a test compares with the stored one
CELL_LIMIT = 150  # seconds; longer than the longest launch of a lab
SIZE_LIMIT = 400_000  # bytes of a solution notebook
MENDED = ("The fixed program: `# <- new` marks what is new, `# gone:` what was left out. Then the "
          "same look.")
# Three numbered sentences: in a lab's source, and in its deck.
LABS_END = re.compile(r"^# ## \d+\. Take with you\n#\n((?:# \d\. .+\n){3})", re.M)
LAST_SLIDE = re.compile(r"^# Take with you\n\n((?:\d\. .+\n){3})", re.M)
STUB = 'raise NotImplementedError("exercise '
WIDTH = 100  # columns of code
SOLUTION = re.compile(r"^([ ]*)### BEGIN SOLUTION\n(.*?)^[ ]*### END SOLUTION[ ]*(?:\n|\Z)",
                      re.M | re.S)


class BuildError(Exception):
    """The source can't be built; the message says where and why."""


def build(root: Path, stems=(), force=False):
    """Build labs/ and solutions/ for `stems` (all by default).

    A notebook whose outputs are kept is executed again when its code has changed.
    force: also execute notebooks that are current (when the bank or the library changed, but not
           the lab), and overwrite cells that the builder did not write
    """
    stems = stems or sources(root)
    if not force:
        _refuse_to_overwrite(root, stems)
    for stem in stems:
        for name, make in _notebooks(stem).items():
            target, notebook = root / name, make(root, stem)
            if make is lab_notebook:
                _write(target, notebook)
            elif force or not is_current(target, notebook):
                if force or not _take_outputs(target, notebook):
                    print(f"{stem}: executing {name}")
                    execute(notebook, root)
                _write(target, notebook)
        deck, text = _deck(root, stem)
        if text:
            deck.write_text(text)
        print(f"{stem}: built")
    if index_builder.is_of(root):
        _build_tables(stems)
        if index_builder.write():
            print("index.json: written")


def _build_tables(stems):
    """Update the tables of the known mistakes: see checks/prover/tables.py."""
    old = [proof for proof in _proofs(stems) if not tables.is_current(proof)]
    try:
        for proof, pairs in tables.build_all(old):
            print(f"{proof.name}: table of {len(proof.mistakes)} mistakes built")
            for first, second in pairs:
                print(f"{proof.name}: these two show the same, so a learner gets both:\n  {first}\n"
                      f"  {second}")
    except tables.PassingMistake as error:
        raise BuildError(str(error)) from None


def _proofs(stems):
    return [item for stem in stems if stem in labs.written()
            for item in labs.checks_of(stem).EXERCISES if isinstance(item, Proof)]


def _notebooks(stem):
    """Return {path: the function that makes it} for the notebooks with the source of `stem`."""
    if stem == labs.TOUR:
        return {f"labs/{stem}.ipynb": tour_notebook}
    return {f"labs/{stem}.ipynb": lab_notebook, f"solutions/{stem}.ipynb": solution_notebook}


def _refuse_to_overwrite(root, stems):
    """Refuse to overwrite a notebook that holds somebody's own cells: they may be answers."""
    paths = [path for stem in stems for path in _notebooks(stem)
             if (root / path).exists() and not read_cells(root / path).as_built]
    if paths:
        raise BuildError(f"{', '.join(paths)}: cells were changed there, and building would lose "
                         "them; move the file to work/ to keep them (--force overwrites them)")


def _deck(root, stem):
    """Return (path of the lab's deck, its text where the last slide doesn't say what the lab's end
    says; else "").
    """
    path = root / "slides" / f"{stem}.md"
    end = LABS_END.search((root / "labs" / "source" / f"{stem}.py").read_text())
    if not (end and path.exists()):
        return path, ""
    text, sentences = path.read_text(), end[1].replace("# ", "")
    deck = LAST_SLIDE.sub(lambda slide: slide[0].replace(slide[1], sentences), text)
    return path, deck if deck != text else ""


def stale(root: Path, stems=()):
    """List the notebooks that no longer match their source. Nothing is executed."""
    old = [path for stem in stems or sources(root) for path, make in _notebooks(stem).items()
           if not is_current(root / path, make(root, stem))]
    old += [f"slides/{stem}.md" for stem in stems or sources(root) if _deck(root, stem)[1]]
    if index_builder.is_of(root):
        old += [f"lib/ranklab/checks/prover/tables/{proof.name}.json"
                for proof in _proofs(stems or sources(root)) if not tables.is_current(proof)]
        if not stems and not index_builder.is_current():
            old.append("lib/ranklab/course/index.json")
    return old


def sources(root):
    """List the stems that have a source, in order, and the tour."""
    return sorted(p.stem for p in (root / "labs" / "source").glob("*.py"))


def is_current(path, notebook):
    """Return whether `path` has the cells of `notebook`, and was executed with them."""
    if not path.exists():
        return False
    output = nbformat.read(path, as_version=4)
    cells = notebook.metadata["ranklab"]["cells"]
    return output.metadata.get("ranklab", {}).get("cells") == cells == cells_hash(output.cells)


def _take_outputs(path, notebook):
    """Copy the outputs of `path` into `notebook` if the code is the same; return whether it is.

    True means that only texts changed, or the words of docstrings.
    """
    if not path.exists():
        return False
    old, new = ([cell for cell in book.cells if cell.cell_type == "code"]
                for book in (nbformat.read(path, as_version=4), notebook))
    if [_without_docstrings(cell.source) for cell in old] != [
            _without_docstrings(cell.source) for cell in new]:
        return False
    for cell, executed in zip(new, old):
        cell.outputs, cell.execution_count = executed.outputs, executed.execution_count
    return True


def _without_docstrings(source):
    """Return `source` with a mark for each line of a docstring: outputs name lines by number."""
    lines = source.splitlines()
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a magic
        return lines
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            words = node.body[0]
            lines[words.lineno - 1:words.end_lineno] = [
                '"""'] * (words.end_lineno - words.lineno + 1)
    return lines


def lab_notebook(root, stem):
    """Return the learner's notebook: the source without marked solutions or advice in stubs.

    It has no outputs, so no outputs are compared.
    """
    return _notebook(root, stem, lambda source: contract(SOLUTION.sub(r"\1...\n", source)
                                                         ).rstrip("\n"), without=COMPARED)


def solution_notebook(root, stem):
    """Return the same lab solved, not yet executed."""
    programs = set()
    return _notebook(root, stem, _solver(stem, _answer, programs),
                     arrange=lambda cells: _with_mended(cells, programs))


def tour_notebook(root, stem):
    """Return the tour with the library's functions in its cells, not yet executed."""
    return _notebook(root, stem, _solver(stem, _function_of_tour))


def _solver(stem, text_of, unchanged=()):
    """Return a function that puts the library's text into one cell after another.

    text_of    name -> the library's text, or None
    unchanged  sources that stay
    """
    bound = set(dir(builtins))

    def solve(source):
        solved = _solve(source, stem, bound, text_of)  # it also looks for names that it lacks
        solved = source if source in unchanged else solved
        bound.update(bound_names(solved))
        return solved

    return solve


def _notebook(root, stem, change_code, without=None, arrange=list):
    text = (root / "labs" / "source" / f"{stem}.py").read_text()
    notebook = jupytext.reads(text, fmt="py:percent")
    notebook.cells = arrange(notebook.cells)
    counts = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = change_code(cell.source)
        tags = [tag for tag in cell.metadata.get("tags", ()) if tag != without]
        cell.metadata = nbformat.NotebookNode({"tags": tags} if tags else {})
        start = digest(cell.source)
        counts[start] = counts.get(start, 0) + 1  # two equal cells still need two ids
        cell.id = f"{start}-{counts[start]}"
    notebook.metadata = nbformat.NotebookNode({
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
        "ranklab": {"stem": stem, "cells": cells_hash(notebook.cells)},
    })
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def _with_mended(cells, programs):
    """Return `cells` with each fixed program right before its check; programs join `programs`.

    A broken program is an exercise that the lab defines without a stub, and looks at before
    the next check. The same cells look at the fixed one. Only their second outputs are compared
    with stored ones, because the report of a hang has times in it.
    """
    arranged, name, looks, is_asked = [], None, [], False
    for cell in cells:
        source = cell.source if cell.cell_type == "code" else ""
        if exercise := _program(source):
            name, program, looks, is_asked = exercise, cell, [], False
        elif name and looks and re.search(rf"^{name} = check\({name}\)", source, re.M):
            copies = copy.deepcopy(looks)
            for look in looks:
                look.metadata["tags"] = [tag for tag in look.metadata.get("tags", ())
                                         if tag != COMPARED]
            fix = marked(program.source, _answer(name))
            programs |= {program.source, fix}
            arranged += [nbformat.v4.new_markdown_cell(MENDED),
                         nbformat.v4.new_code_cell(fix), *copies]
            name = None
        elif "check(" in source:
            is_asked = True
        elif source and name and not is_asked:
            looks.append(cell)
        arranged.append(cell)
    return arranged


def _program(source):
    """The name of the exercise that a cell defines without a stub, and nothing else; or None."""
    try:
        node, *rest = ast.parse(source).body
    except (SyntaxError, ValueError):  # no Python, which _solve reports; or an empty cell
        return None
    is_program = (isinstance(node, ast.FunctionDef | ast.ClassDef) and not rest
                  and STUB not in source and labs.find_exercise(node.name))
    return node.name if is_program else None


def marked(program, answer):
    """Return `answer` with a mark at each line that is not in `program`.

    A line that was removed and not replaced becomes a comment.
    """
    before, after, lines = program.splitlines(), answer.splitlines(), []
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for operation, i, j, first, end in matcher.get_opcodes():
        for line in before[i:j] if operation == "delete" else ():
            indent = line[:len(line) - len(line.lstrip())]
            lines.append(f"{indent}# gone: {line.strip()}")
        for line in after[first:end]:
            mark = f"{line}  # <- new"
            if operation == "equal" or not line.strip():
                lines.append(line)
            elif len(mark) <= WIDTH:
                lines.append(mark)
            else:  # the line is full
                lines += [f"{line[:len(line) - len(line.lstrip())]}# new:", line]
    text = "\n".join(lines)
    if ast.dump(ast.parse(text)) != ast.dump(ast.parse(answer)):
        raise BuildError(f"a mark is not in a comment:\n{text}")
    return text


def _answer(name):
    """Return the library's text of the exercise `name`; None where no exercise has this name."""
    exercise = labs.find_exercise(name)
    return exercise and _text(exercise.answer)


def _function_of_tour(name):
    """Return the text of the function `name` of projects/tour.py; None where it has none."""
    function = vars(tour).get(name)
    return _text(function) if inspect.isfunction(function) else None


def _text(function):
    return textwrap.dedent(inspect.getsource(function)).rstrip("\n")


def _solve(source, stem, bound, text_of):
    """`source` with each stub replaced by the library's text and each `...` by its working."""
    source = SOLUTION.sub(lambda match: match[2], source).rstrip("\n")
    lines = source.splitlines()
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise BuildError(f"{stem}: a cell is not Python ({error.msg}):\n{source}") from None
    for node in reversed(tree.body):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        answer = text_of(node.name)
        if answer is None:
            continue
        names = free_names(answer) - bound - bound_names(source)
        if names:
            raise BuildError(f"{stem}: the answer {node.name} uses {', '.join(sorted(names))}, "
                             "which no earlier cell of the lab imports or defines")
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        lines[first - 1 : node.end_lineno] = answer.splitlines()
    return re.sub(r"\b(\w+)=\.\.\.", _working, "\n".join(lines))


def _working(match):
    prediction = labs.find_prediction(match[1])
    return f"{match[1]}={prediction.solution}" if prediction else match[0]


def execute(notebook, root):
    """Run the notebook from top to bottom and keep the outputs in it.

    Raises: BuildError with the cell's own error; or when an output contains a local path
    """
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    (root / "solutions").mkdir(exist_ok=True)
    try:
        run_cells(notebook, root / "solutions", CELL_LIMIT, {"RANKLAB_ANSWERS": "1"},
                  coalesce_streams=True, record_timing=False)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise BuildError(f"{notebook.metadata['ranklab']['stem']}: {plain(str(error))}") from None
    notebook.metadata["language_info"] = {"name": "python"}  # not the builder's Python version
    _refuse_local_paths(notebook, root)
    size = len(nbformat.writes(notebook).encode())
    if size > SIZE_LIMIT:
        raise BuildError(f"the executed notebook has {size} bytes; the limit is {SIZE_LIMIT}")


def _refuse_local_paths(notebook, root):
    for cell in notebook.cells:
        outputs = json.dumps(cell.get("outputs", []), ensure_ascii=False)
        for path in (str(root.resolve()), str(Path.home()) + os.sep):
            if path.strip(os.sep) and path in outputs:
                raise BuildError(f"an output shows a path of this machine ({path}):\n{cell.source}")


def _write(path, notebook):
    path.parent.mkdir(exist_ok=True)
    text = nbformat.writes(notebook).rstrip("\n") + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_whole(path, text)
