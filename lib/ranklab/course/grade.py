"""grade: every submitted notebook is checked again, by itself, and believed in nothing.

The verdicts printed in a notebook don't count, nor what it does to `check` or to ranklab: its
functions are taken out of it, and judged in a process that it never touched. A notebook that
crashes, hangs or deletes its folder costs only its own row.

    grade.py       the table and the CSV
    submission.py  one notebook: run, judged
    submitted.py   what its text says, before anything runs
    sandbox.py     a process with a limit, that leaves nothing behind
    regrade.py     what runs in there
"""

import csv
import sys
from pathlib import Path

from ranklab.course import labs
from ranklab.course.submission import Row, grade_notebook
from ranklab.course.submitted import names_of

STOPPED = 130  # the exit code of a program that was ended by Ctrl-C
NAMES_SHOWN = 3


def grade(folder: Path, csv_path: Path | None = None, limit: float = 600) -> int:
    """A row for each notebook below `folder` is printed, and written to `csv_path`.

    limit  seconds for a notebook's cells, and as many for its checks
    Returns the exit code: 0, or 2 when there is nothing to grade, or no place for the table.
    """
    folder = Path(folder)
    found = _notebooks(folder)
    if not found:
        print(f"ranklab grade: there is no notebook in {folder}")
        return 2
    try:
        table = csv_path and open(csv_path, "w", newline="", encoding="utf-8",
                                  errors="replace")
    except OSError as error:  # now, not after an hour of grading
        print(f"ranklab grade: the table can't be written: {error}")
        return 2
    rows, code = [], 0
    width = max(len(name) for name, _ in found)
    print(f"{'submission':{width}}  passed  not passed, and notes")
    try:
        for name, path in found:
            rows.append(grade_notebook(path, name, limit))
            print(_line(rows[-1], width), flush=True)
    except KeyboardInterrupt:
        print(f"stopped: {len(rows)} of {len(found)} are graded", file=sys.stderr)
        code = STOPPED
    if table:
        with table:
            _write_csv(table, rows)
    return code


def _notebooks(folder):
    """[(name in the table, path)] in a fixed order; hidden folders are left out."""
    if folder.is_file():
        return [(folder.name, folder)]
    paths = {path.relative_to(folder): path for path in folder.rglob("*.ipynb") if path.is_file()}
    return [(name.as_posix(), path) for name, path in sorted(paths.items())
            if not any(part.startswith(".") for part in name.parts)]


def _line(row: Row, width):
    passed = f"{len(row.passed())}/{len(row.states)}" if row.states else "-"
    names = row.not_passed()
    more = [f"{len(names) - NAMES_SHOWN} more"] if len(names) > NAMES_SHOWN else []
    parts = [", ".join(names[:NAMES_SHOWN] + more), *row.notes]
    line = f"{row.name:{width}}  {passed:>6}  {'; '.join(filter(None, parts))}".rstrip()
    return "".join(c if c.isprintable() else "?" for c in line)  # a learner's text, too, is in it


def _write_csv(file, rows):
    stems = [stem for stem in labs.STEMS if any(row.stem == stem for row in rows)]
    names = [name for stem in stems for name in names_of(stem)]
    writer = csv.writer(file)
    writer.writerow(["submission", "lab", "passed", "of", "note", *names])
    for row in rows:
        cells = [_cell(row, name) for name in names]
        writer.writerow([row.name, row.stem or "", len(row.passed()), len(row.states),
                         "; ".join(row.notes), *cells])


def _cell(row, name):
    state, reason = row.states.get(name, ""), row.reasons.get(name, "")
    return f"{state}: {reason}" if reason and name in row.not_passed() else state
