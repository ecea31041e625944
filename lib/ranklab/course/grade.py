"""grade: every submitted notebook is run and checked again; its saved outputs are not trusted.

Each runs in a fresh kernel, where `check` judges its functions and numbers anew. A notebook that
raises, hangs or ends its process costs only its own row.

This is for a class that you trust: submissions are programs, and they run with your rights. For
those you don't trust, use a container: docs/teaching.md has the command.

    grade.py       the table, row by row
    class_files.py the CSV and the report of the class
    mistakes.py    the report's mistakes by name; lesson.py: where the lab teaches an exercise
    submission.py  one notebook and its row
    submitted.py   its text, read before anything runs
    rerun.py       its run in a fresh kernel
"""

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

from ranklab.course import labs
from ranklab.course.class_files import Report, Table
from ranklab.course.submission import Row, grade_notebook
from ranklab.course.submitted import Notebook, Unreadable
from ranklab.course.tags import printable

NAMES_SHOWN = 3


def grade(folder: Path, csv_path: Path | None = None, limit: float = 600,
          html_path: Path | None = None) -> int:
    """Print a row for each notebook below `folder`; write the table and the report of the class.

    csv_path, html_path  output files; both are complete after every row
    limit                seconds for a notebook
    Returns the exit code: 0; 2 when there is nothing to grade, or a file can't be written; and 128
    plus the signal's number when it was stopped.
    """
    folder = Path(folder)
    submissions = {name: notebook for name, notebook in _handed_in(folder).items()
                   if getattr(notebook, "stem", None) != labs.TOUR}  # which asks for nothing
    if not submissions:
        print(f"ranklab grade: there is no notebook in {folder}")
        return 2
    sheets = [kind(path, submissions)
              for kind, path in ((Table, csv_path), (Report, html_path)) if path]
    if problem := _first(sheet.try_place() for sheet in sheets):  # not after an hour of grading
        print(f"ranklab grade: {problem}")
        return 2
    rows = []
    width = max(len(name) for name in submissions)
    print(f"{'submission':{width}}  passed  not passed, and notes")
    try:
        with _stoppable():
            for name, notebook in submissions.items():
                rows.append(Row(name, notes=[f"unreadable: {notebook}"])
                            if isinstance(notebook, Unreadable)
                            else grade_notebook(notebook, name, limit))
                print(_line(rows[-1], width), flush=True)
                problem = _first([sheet.write(rows) for sheet in sheets])
    except KeyboardInterrupt as stop:
        print(f"stopped: {len(rows)} of {len(submissions)} are graded", file=sys.stderr)
        return 128 + (stop.args or [signal.SIGINT])[0]
    if problem:
        print(f"ranklab grade: {problem}")
    return 2 if problem else 0


def _first(problems):
    return next(filter(None, problems), None)


@contextlib.contextmanager
def _stoppable():
    """Let SIGTERM and SIGHUP end the grading in this block as Ctrl-C does."""

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
    """Return {name in the table: its Notebook, or Unreadable}, in order, without hidden files."""
    if folder.is_file():
        return {folder.name: _read(folder)}
    submissions = {}

    def refuse(error):
        if Path(error.filename) != folder:
            submissions[Path(error.filename).relative_to(folder)] = Unreadable(error.strerror)

    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(place, name) for name in files if not name.startswith(".")):
            if path.suffix == ".ipynb":
                submissions[path.relative_to(folder)] = _read(path)
    return {path.as_posix(): submissions[path] for path in sorted(submissions)}


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
    return printable(line)  # it also holds a learner's text
