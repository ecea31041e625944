"""Print the labs that the last commits touched, "03 06": what .ci/run sweeps.

A file of lib/ranklab belongs to each lab that imports it: from its own packages (technique, checks,
projects, plots) through all that lies below. Another lab's technique is not entered, for that lab
answers for it; the names that a lab takes from there count.
"""

import argparse
import functools
import pathlib
import re
import subprocess
import sys

from ranklab.basics.imports import LIB, imports
from ranklab.course import labs

ROOT = pathlib.Path(__file__).resolve().parent.parent
WINGS = ("", "checks", "projects", "plots")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=10, help="so many of the last ones")
    number = parser.parse_args().commits + 1
    try:
        history = git("rev-list", "--first-parent", f"--max-count={number}", "HEAD")
        changed = git("diff", "--name-only", history[-1], "HEAD")
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"touched.py: no history to look at: {error}", file=sys.stderr)
        changed = []
    print(*(stem[:2] for stem in labs.STEMS if any(belongs(name, stem) for name in changed)))


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, text=True, check=True,
                          stdout=subprocess.PIPE).stdout.split("\n")[:-1]


def belongs(name, stem):
    """Return True where the file `name` of the repository is one of the lab's."""
    if name.startswith("lib/ranklab/"):
        return ROOT / name in library_files(stem)
    number, idea = stem[:2], labs.idea(stem)
    return bool(re.match(rf"labs/source/{stem}\.|slides/{stem}\.|slides/figures/{number}_|"
                         rf"tests/right_answers/{idea}[/._]|tests/test_{idea}[_.]", name))


@functools.cache
def library_files(stem):
    """Return the files of lib/ranklab that the lab runs."""
    own = [path for wing in WINGS for path in files_of(LIB / wing / labs.idea(stem))]
    others = {LIB / labs.idea(other) for other in labs.STEMS if other != stem}
    files, todo = set(), [ROOT / "labs" / "source" / f"{stem}.py", *own]
    while todo:
        path = todo.pop()
        if path in files:
            continue
        files.add(path)
        if not others & {path.parent, *path.parents}:
            todo += imports(path)
    return files


def files_of(place):
    """Return the Python files of a package or of a module."""
    return [*place.rglob("*.py"), *([place.with_suffix(".py")] * place.with_suffix(".py").exists())]


if __name__ == "__main__":
    main()
