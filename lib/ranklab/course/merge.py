"""`ranklab work --merge`: the learner's cells go from the old copy of a lab into the newer one.

A cell is the learner's when its text is not the one from which the builder made its id. It replaces
the cell with its id, or the stub of the same exercise; a predicted number replaces `...`. If the
exercise has moved to another lab, the cell goes into that lab's copy. Any other cell is inserted
after the one that it followed. Both copies are kept.
"""

import ast
import json
import re
import uuid
from pathlib import Path

from ranklab.basics.files import write_whole
from ranklab.course import labs
from ranklab.course.notebook import digest, read_cells
from ranklab.course.submitted import definitions


def merge(folder: Path, stem):
    """Replace the learner's copy by the newer lab with their cells in it; return a sentence.

    folder/STEM.old.ipynb: the old copy; a newer lab that somebody has edited is kept as well
    Raises: ValueError if there is no newer lab, or one of the two is not a notebook
    """
    copy = folder / f"{stem}.ipynb"
    newer = newest(folder, stem)
    if not newer or not copy.exists():
        raise ValueError(f"{folder.name}/ has no newer version of {stem} next to your copy")
    for path in (copy, newer):
        if read_cells(path).now is None:
            raise ValueError(f"{path} can't be read as a notebook, and nothing was changed")
    text, notebook = copy.read_text(encoding="utf-8"), json.loads(newer.read_text(encoding="utf-8"))
    other_labs = OtherLabs(folder, stem)
    count = bring_cells(json.loads(text)["cells"], notebook["cells"],
                        set(labs.names_of(stem)), other_labs)
    other_labs.write()
    paths = [keep(text, copy)]
    if not read_cells(newer).as_built:
        paths.append(keep(newer.read_text(encoding="utf-8"), copy))
    write_whole(copy, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    newer.unlink()
    return (f"{stem}: {copy.name} is the newer version, with {count} of your cells; "
            f"{other_labs}the old copy is {' and '.join(path.name for path in paths)}. "
            "Run all cells again.")


def newest(folder, stem):
    """Find the newer lab that `ranklab work` put next to a copy, the last of several; or None."""
    paths = {int(match[1] or 1): path for path in folder.glob(f"{stem}.new*.ipynb")
             if (match := re.fullmatch(rf"{stem}\.new(\d*)\.ipynb", path.name))}
    return paths[max(paths)] if paths else None


def keep(text, copy):
    """Write `text` to a new file next to `copy`; return its path."""
    number = 1
    while (path := copy.with_name(f"{copy.stem}.old{number if number > 1 else ''}.ipynb")).exists():
        number += 1
    write_whole(path, text)
    return path


class OtherLabs:
    """The copies of the other labs, for the learner's cells whose exercise has moved to one.

    Such a cell goes into the newest version of the copy in `folder`, if that has the stub
    untouched. A cell that the learner added stays in its lab, whatever it defines.
    """

    def __init__(self, folder, stem):
        self.folder, self.stem = folder, stem
        self.notebooks, self.names = {}, {}  # by path: what it holds; the exercises that came

    def take(self, cell):
        """Put the cell into the lab with its exercise or prediction; return whether that worked."""
        names = asked_in(cell)
        stems = {labs.stem_of(name) for name in names} - {None, self.stem}
        is_added = not re.fullmatch(r"[0-9a-f]+-\d+", str(cell.get("id")))  # not by the builder
        path = not is_added and len(stems) == 1 and self.path_of(stems.pop())
        if not path or not place_for(cell, None, self.notebook(path)["cells"], names):
            return False
        self.names.setdefault(path, []).extend(sorted(names))
        return True

    def path_of(self, stem):
        """Return the path of the newest version of the copy of `stem`, or None."""
        path = newest(self.folder, stem) or self.folder / f"{stem}.ipynb"
        return path if path.exists() and read_cells(path).now is not None else None

    def notebook(self, path):
        if path not in self.notebooks:
            self.notebooks[path] = json.loads(path.read_text(encoding="utf-8"))
        return self.notebooks[path]

    def write(self):
        """Write the notebooks that received a cell."""
        for path in self.names:
            write_whole(path, json.dumps(self.notebooks[path], indent=1, ensure_ascii=False) + "\n")

    def __str__(self):
        return "".join(f"{', '.join(names)}: now in {path.name}; "
                       for path, names in self.names.items())


def asked_in(cell):
    """Find the exercises that a cell defines, and the predictions that it answers."""
    names = set(definitions(source(cell))) | set(numbers_in(cell))
    return {name for name in names if labs.stem_of(name)}


def bring_cells(old, new, names, other_labs):
    """Copy the learner's cells from `old` into `new`, both lists of cells; return how many.

    names       of the exercises and predictions of this lab
    other_labs  the OtherLabs: cells that go there are not counted
    """
    count, last = 0, None  # last: the cell of `new` that stands for the one before
    for cell in old:
        same = next((one for one in new if one.get("id") == cell.get("id")
                     or source(one) == source(cell)), None)
        is_new = not same or source(same) != source(cell)
        if is_new and is_of_learner(cell) and source(cell).strip():
            if not same and other_labs.take(cell):
                continue
            last = place_for(cell, same, new, names) or insert(cell, last, new)
            count += 1
        else:
            last = same or last
    return count


def is_of_learner(cell):
    """Return whether somebody wrote or edited the cell."""
    return digest(source(cell)) != str(cell.get("id")).partition("-")[0]


def source(cell):
    return "".join(cell["source"])


def place_for(cell, same, new, names):
    """Put the text of `cell` into its place in `new`: the same cell, stub or prediction.

    Returns: the cell of `new`; None where there is no place for it
    """
    if cell["cell_type"] != "code":
        return None
    exercises = names & set(definitions(source(cell)))
    stub = same or next((one for one in new if one["cell_type"] == "code"
                         and exercises and exercises <= set(definitions(source(one)))), None)
    if stub and not is_of_learner(stub):
        stub["source"] = cell["source"]
        return stub
    return None if stub else predicted(cell, new)


def predicted(cell, new):
    """Put the numbers that `cell`, a single check(...), predicts into the cell of `new` that asks.

    Returns: the cell of `new`, or None
    """
    numbers = numbers_in(cell)
    for one in new if numbers else ():
        text = source(one)
        if one["cell_type"] == "code" and all(f"{name}=..." in text for name in numbers):
            for name, number in numbers.items():
                text = re.sub(rf"\b{name}=\.\.\.", lambda _, pair=f"{name}={number}": pair, text)
            one["source"] = text
            return one
    return None


def numbers_in(cell):
    """Return {prediction: its number, as text} of a cell that is a single check(...)."""
    try:
        calls = [node.value for node in ast.parse(source(cell)).body if isinstance(node, ast.Expr)]
    except (SyntaxError, ValueError):
        return {}
    return {word.arg: ast.unparse(word.value) for call in calls if isinstance(call, ast.Call)
            for word in call.keywords if ast.unparse(call.func) == "check"}


def insert(cell, last, new):
    """Insert a copy of `cell` into `new` after the cell `last`, or first; return the copy."""
    ids = {one.get("id") for one in new}
    copy = cell | ({"id": uuid.uuid4().hex[:8]} if cell.get("id") in ids else {})
    new.insert(new.index(last) + 1 if last else 0, copy)
    return copy
