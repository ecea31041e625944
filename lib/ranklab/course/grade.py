"""grade: every submitted notebook is checked again, by itself, and nothing it says is believed.

The verdicts printed in a notebook don't count, nor what it does to `check` or to ranklab: its
functions are taken out of it, and each is judged in a process that it never touched and that can
say nothing about the others. A notebook that crashes, hangs or deletes its folder costs only its
row.

It is a check for an honest class, and no sandbox. Submissions run with your rights, so a malicious
one can change the grader's files on the disk or kill the grader. A
function under test runs beside its own check: it can read the frames above it and say that it
passed, put a thing back after it changed it, run the library's text from a copy of its file, or do
in its ranks what it likes. A note names the words that such code needs, where it uses them openly.
So read the code that has a note, and run everything in a container.

    grade.py       the table, row by row
    class_files.py the CSV and the report of the class
    mistakes.py    the report's mistakes by their names; lesson.py: where the lab teaches it
    submission.py  one notebook: run, judged
    submitted.py   what its text says, before anything runs
    predicted.py   the numbers that it predicts
    sandbox.py     a process with a limit, that leaves nothing behind
    clean_process.py  what such processes are forked from
    regrade.py     what runs in there
"""

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

from ranklab.course import labs, sandbox
from ranklab.course.class_files import Report, Table
from ranklab.course.submission import Row, grade_notebook
from ranklab.course.submitted import Notebook, Unreadable
from ranklab.course.tags import printable

NAMES_SHOWN = 3


def grade(folder: Path, csv_path: Path | None = None, limit: float = 600,
          html_path: Path | None = None) -> int:
    """A row for each notebook below `folder` is printed, and written to `csv_path`; the report of
    the class is written to `html_path`.

    limit  seconds for a notebook's cells, and as many for its checks
    Returns the exit code: 0; 2 when there is nothing to grade, or no place for a file; and 128 and
    the signal's number when it was stopped. Both files are whole after every row.
    """
    folder = Path(folder)
    # All are read before any runs and changes another. The tour asks for nothing.
    found = {name: notebook for name, notebook in _handed_in(folder).items()
             if getattr(notebook, "stem", None) != labs.TOUR}
    if not found:
        print(f"ranklab grade: there is no notebook in {folder}")
        return 2
    sheets = [kind(path, found) for kind, path in ((Table, csv_path), (Report, html_path)) if path]
    if problem := _first(sheet.try_place() for sheet in sheets):  # not after an hour of grading
        print(f"ranklab grade: {problem}")
        return 2
    rows = []
    width = max(len(name) for name in found)
    print(f"{'submission':{width}}  passed  not passed, and notes")
    try:
        with _stoppable(), sandbox.adopting() as clean:
            for name, notebook in found.items():
                rows.append(Row(name, notes=[f"unreadable: {notebook}"])
                            if isinstance(notebook, Unreadable)
                            else grade_notebook(notebook, name, limit, clean))
                print(_line(rows[-1], width), flush=True)
                problem = _first([sheet.write(rows) for sheet in sheets])
    except KeyboardInterrupt as stop:
        print(f"stopped: {len(rows)} of {len(found)} are graded", file=sys.stderr)
        return 128 + (stop.args or [signal.SIGINT])[0]
    if problem:  # a submission deleted its folder
        print(f"ranklab grade: {problem}")
    return 2 if problem else 0


def _first(problems):
    return next(filter(None, problems), None)


@contextlib.contextmanager
def _stoppable():
    """Inside, SIGTERM and SIGHUP end the grading as Ctrl-C does."""

    def stop(number, _):
        raise KeyboardInterrupt(number)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP) if is_main else ()  # others get no signals
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handed_in(folder):
    """{name in the table: its Notebook, or Unreadable}, in order; hidden ones are left out."""
    found = {}

    def refused(error):
        if Path(error.filename) != folder:
            found[Path(error.filename).relative_to(folder)] = Unreadable(error.strerror)

    if folder.is_file():
        return {folder.name: _read(folder)}
    for place, folders, files in os.walk(folder, onerror=refused):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(place, name) for name in files if not name.startswith(".")):
            if path.suffix == ".ipynb":
                found[path.relative_to(folder)] = _read(path)
    return {path.as_posix(): found[path] for path in sorted(found)}


def _read(path):
    try:
        return Notebook(path)
    except Unreadable as error:
        return error


def _line(row: Row, width):
    passed = f"{len(row.passed())}/{len(row.states)}" if row.states else "-"
    names = row.not_passed()
    more = [f"{len(names) - NAMES_SHOWN} more"] if len(names) > NAMES_SHOWN else []
    parts = [", ".join(names[:NAMES_SHOWN] + more), *row.notes]
    line = f"{row.name:{width}}  {passed:>6}  {'; '.join(filter(None, parts))}".rstrip()
    return printable(line)  # it holds a learner's text, too
