"""Find the library files that a library file imports, from their text; nothing is run."""

import ast
import functools
import re
from pathlib import Path

LIB = Path(__file__).parent.parent
PROGRAM = re.compile(r"(?:from|import) (ranklab(?:\.\w+)+)")


def imported(files):
    """Return `files` with every library file that they import, directly or indirectly."""
    reached, todo = set(), [*files]
    while todo:
        path = todo.pop()
        if path not in reached:
            reached.add(path)
            todo += imports(path)
    return reached


@functools.cache
def imports(path):
    """Return the files of lib/ranklab that the file at `path` imports.

    Imports inside functions count, and so do imports in the text of a program that the file starts.
    """
    files = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ranklab"):
            files |= {file_of(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            files |= {file_of(alias.name) for alias in node.names
                      if alias.name.startswith("ranklab")}
        elif isinstance(node, ast.Constant):
            files |= {file_of(module) for module in PROGRAM.findall(str(node.value))}
    return {path for path in files if path.exists()}           # a program may name a deleted file


@functools.cache
def file_of(module, name=None):
    """Find the file that defines `name` of `module`; follow imports in a package's __init__.py."""
    place = LIB.joinpath(*module.split(".")[1:])
    if not (place / "__init__.py").exists():
        return place.with_suffix(".py")
    if name and ((place / name).is_dir() or (place / f"{name}.py").exists()):
        return file_of(f"{module}.{name}")
    for node in ast.parse((place / "__init__.py").read_text()).body:
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            return file_of(node.module, name)
    return place / "__init__.py"
