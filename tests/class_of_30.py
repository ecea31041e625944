"""A class: 30 submissions of three labs - good, half done, wrong.

    python tests/class_of_30.py FOLDER          the notebooks
    ranklab grade FOLDER --csv grades.csv --html report.html

Its mistakes are those of the checks, its own ways tests/right_answers. A seed gives the same
notebooks each time.
"""

import argparse
import ast
import inspect
import random
import re
import textwrap
from pathlib import Path

import nbformat

from ranklab.basics.edits import edited_text
from ranklab.basics.names import bound_names, free_names
from ranklab.course import build, labs
from ranklab.course.outline import outline

HERE = Path(__file__).parent
ROOT = HERE.parent
# Cheap to grade, and no cell of theirs depends on the clock, as one of lab 00's does.
STEMS = "08_tensor_parallel", "09_pipeline_parallel", "13_planner"
KINDS = {"good": 4, "half": 3, "wrong": 3}  # of each lab
COMMON = 3  # a wrong answer is one of so many, so that some mistakes are made more than once


def write_class(folder, seed=0, stems=STEMS, kinds=KINDS, most=None):
    """The notebooks are in `folder`, a sub-folder for each lab.

    most  exercises that are handed in, the first ones of the lab; what comes after is left out
    """
    draw = random.Random(seed)
    for stem in stems:
        lab, place = Lab(stem, most), Path(folder) / stem
        place.mkdir(parents=True)
        for kind, number in kinds.items():
            for n in range(1, number + 1):
                (place / f"{kind}_{n}.ipynb").write_text(getattr(lab, kind)(draw))


class Lab:
    """The lab as it is handed out, and what learners write into it."""

    def __init__(self, stem, most=None):
        self.stem, self.most, self.exercises = stem, most, labs.checks_of(stem).EXERCISES
        self.predictions = labs.checks_of(stem).PREDICTIONS
        order = [one.name for one in outline(stem)]
        self.names = sorted((one.name for one in self.exercises), key=order.index)[:most]
        self.answers = {one.name: textwrap.dedent(inspect.getsource(one.answer))
                        for one in self.exercises}
        self.wrong_ones = {name: [] for name in self.names}
        for one in self.exercises:
            for slip in one.mistakes if one.name in self.names else ():
                texts = [edited_text(one.answer, program) for program in slip.programs
                         if not callable(program)]
                self.wrong_ones[one.name] += [text for text in texts if free_names(
                    text) <= free_names(self.answers[one.name])]

    def good(self, draw):
        """All is solved: as the library does it, in another way, or with other names."""
        return self.filled({name: self.right(name, draw) for name in self.names},
                           {one.name: one.solution for one in self.predictions})

    def half(self, draw):
        """The first half is written, with one mistake; all else are stubs."""
        names = self.names[:(len(self.names) + 1) // 2]
        mistaken = draw.choice([name for name in names if self.wrong_ones[name]])
        return self.filled({name: self.wrong_one(name, draw) if name == mistaken
                            else self.right(name, draw) for name in names}, {})

    def wrong(self, draw):
        """Two exercises in three are wrong, and so are the numbers with a usual slip."""
        names = [name for name in self.names if self.wrong_ones[name]]
        wrong = {names[0], *(name for name in names if draw.random() < 2 / 3)}
        slips = {one.name: draw.choice(list(one.mistakes)) for one in self.predictions
                 if one.mistakes}
        return self.filled({name: self.wrong_one(name, draw) if name in wrong
                            else self.right(name, draw) for name in self.names}, slips)

    def right(self, name, draw):
        return draw.choice([self.answers[name], renamed(self.answers[name]), *self.others(name)])

    def others(self, name):
        """Right answers of another kind, each with what it needs from its file."""
        path = HERE / "right_answers" / f"{labs.idea(self.stem)}.py"
        nodes = ast.parse(path.read_text()).body if path.exists() else []
        given = "\n".join(ast.unparse(node) for node in nodes if isinstance(
            node, ast.Import | ast.ImportFrom) or "__" not in getattr(node, "name", "__"))
        all_of_them = {node.name for node in nodes if "__" in getattr(node, "name", "")}
        for node in nodes:
            if getattr(node, "name", "").startswith(f"{name}__"):
                node.name = name
                text = ast.unparse(node)
                if not all_of_them & set(re.findall(r"\w+", text)):  # it is made of no other one
                    yield f"{given}\n\n\n{text}"

    def wrong_one(self, name, draw):
        return draw.choice(self.wrong_ones[name][:COMMON])

    def filled(self, sources, numbers):
        """The lab as a notebook, with these definitions and numbers in it."""
        notebook = build.lab_notebook(ROOT, self.stem)
        solved = build.solution_notebook(ROOT, self.stem)
        cells = as_handed_out(solved.cells)
        for cell, worked in zip(notebook.cells, cells, strict=True):
            if cell.cell_type == "code":
                written = sources.keys() & bound_names(worked.source)
                source = worked.source if written else cell.source  # it has the answer's imports
                for node in reversed(ast.parse(source).body):
                    if text := sources.get(getattr(node, "name", None)):
                        source = replaced(source, node, text)
                cell.source = re.sub(r"\b(\w+)=\.\.\.", lambda asked: (
                    f"{asked[1]}={numbers.get(asked[1], '...')}"), source)
        if self.most:
            last = [f"{self.names[-1]} = check(" in cell.source for cell in notebook.cells]
            del notebook.cells[last.index(True) + 1:]
        return nbformat.writes(notebook)


def as_handed_out(cells):
    """The solution's cells without what it adds before a check: a fixed program, its looks."""
    is_added, left = False, []
    for cell in cells:
        if cell.source == build.MENDED:
            is_added = True
        elif re.search(r"^(\w+) = check\(\1\)", cell.source, re.M):
            is_added = False
        if not is_added:
            left.append(cell)
    return left


def replaced(source, node, text):
    """`source` with `text` in the place of the definition `node`."""
    lines = source.splitlines()
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    lines[first - 1:node.end_lineno] = text.rstrip().splitlines()
    return "\n".join(lines)


def renamed(text):
    """The same function with other names for its own variables."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    own = {node.id for node in nodes
           if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own -= {node.arg for node in nodes if isinstance(node, ast.arg)}
    if any(isinstance(node, ast.ClassDef | ast.Global | ast.Nonlocal) for node in nodes):
        return text
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in own:
            node.id = f"my_{node.id}"
    return ast.unparse(tree)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="a new one")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_class(options.folder, options.seed)
