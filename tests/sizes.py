"""How many lines a lab has, by part, and the check of each exercise. `python tests/sizes.py` prints
a table.
"""

import ast
import inspect
from collections import Counter
from pathlib import Path

from ranklab.course import labs

ROOT = Path(__file__).resolve().parent.parent
LIB = ROOT / "lib" / "ranklab"
PARTS = ("library", "checks", "project", "questions", "figures", "text", "deck", "tests", "answers")


def lines_of(*places):
    """Lines of all files there, folders with all that is in them."""
    files = {file for place in places
             for file in (place.rglob("*.*") if place.is_dir() else [place])
             if file.suffix in (".py", ".yaml", ".md") and file.is_file()}
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def of_lab(stem):
    """{part: lines}; "tests" are those of the lab, and "answers" the wrong and right ones."""
    idea, tests = stem.partition("_")[2], ROOT / "tests"
    return dict(zip(PARTS, (
        lines_of(LIB / idea, LIB / f"{idea}.py"),
        lines_of(LIB / "checks" / idea, LIB / "checks" / f"{idea}.py"),
        lines_of(LIB / "projects" / idea),
        lines_of(LIB / "interview" / f"{idea}.yaml"),
        lines_of(LIB / "plots" / f"{idea}.py", ROOT / "slides" / "figures" / f"{stem}.py"),
        lines_of(ROOT / "labs" / "source" / f"{stem}.py"),
        lines_of(ROOT / "slides" / f"{stem}.md"),
        lines_of(*tests.glob(f"test_{idea}*.py")),
        lines_of(*(tests / kind / name for kind in ("wrong_answers", "right_answers")
                   for name in (idea, f"{idea}.py"))))))


def of_checks(stem):
    """{exercise: lines of its check, with all that no other exercise of the lab uses}"""
    package = LIB / "checks" / stem.partition("_")[2]
    names = {}  # (module, name): (its lines, the names that it uses)
    for path in package.glob("*.py"):
        names |= _names_in(f"ranklab.checks.{package.name}.{path.stem}", path)
    used = {item.name: _reached(names, (inspect.getmodule(item.check).__name__,
                                        item.check.__name__))
            for item in labs.checks_of(stem).EXERCISES}
    times = Counter(each for mine in used.values() for each in mine)
    return {name: sum(names[each][0] for each in mine if times[each] == 1)
            for name, mine in used.items()}


def _names_in(module, path):
    """{(module, name): (lines, {what it uses})}; an import uses the name where it comes from."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ranklab.checks."):
            for alias in node.names:
                found[module, alias.asname or alias.name] = 0, {(node.module, alias.name)}
        uses = {(module, part.id) for part in ast.walk(node) if isinstance(part, ast.Name)}
        bound = [node.name] if hasattr(node, "name") else [
            part.id for target in getattr(node, "targets", ()) for part in ast.walk(target)
            if isinstance(part, ast.Name)]
        for number, name in enumerate(bound):  # several of one line are counted once
            found[module, name] = (node.end_lineno - node.lineno + 1) * (number == 0), uses
    return found


def _reached(names, start):
    seen, todo = set(), [start]
    while todo:
        if (name := todo.pop()) in names and name not in seen:
            seen.add(name)
            todo += names[name][1]
    return seen


if __name__ == "__main__":
    print(f"{'':22}" + "".join(f"{part:>10}" for part in (*PARTS, "in all")))
    for stem in labs.written():
        sizes = of_lab(stem)
        print(f"{stem:22}" + "".join(f"{n:10,}" for n in (*sizes.values(), sum(sizes.values()))))
    for stem in labs.written():
        print(stem, ", ".join(f"{name} {n}" for name, n in of_checks(stem).items()))
