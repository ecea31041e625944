"""One submitted notebook: run in a copy, then judged in a process that it never touched."""

import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from ranklab.course import labs, sandbox
from ranklab.course.check import FAILED, PASSED
from ranklab.course.regrade import Log
from ranklab.course.submitted import Notebook, Unreadable, names_of

CELL_SHARE = 0.3  # of a notebook's limit: what one cell may take, or the check of one exercise


@dataclass
class Row:
    """One line of the table: what became of one submission."""

    name: str
    stem: str | None = None
    notes: list = field(default_factory=list)
    states: dict = field(default_factory=dict)  # of each exercise and prediction of its lab
    reasons: dict = field(default_factory=dict)  # why it did not pass

    def set(self, name, state, reason=""):
        self.states[name], self.reasons[name] = state, reason

    def passed(self):
        return [name for name, state in self.states.items() if state == PASSED]

    def not_passed(self):
        return [name for name, state in self.states.items() if state != PASSED]


def grade_notebook(path, name, limit):
    """The row of one notebook. Its cells get `limit` seconds in all, and its checks as many."""
    try:
        notebook = Notebook(path)
    except Unreadable as error:
        return Row(name, notes=[f"unreadable: {error}"])
    row = Row(name, notebook.stem)
    if row.stem is None:
        row.notes.append("no exercise of a lab is in it")
        return row
    with tempfile.TemporaryDirectory(prefix="ranklab-", ignore_cleanup_errors=True) as scratch:
        scratch = Path(scratch).resolve()
        try:
            _run_cells(path, notebook, scratch, limit, row)
            _judge(notebook, scratch, limit, row)
        except Exception as error:  # whatever else is strange about it costs only its own row
            row.notes.append(f"could not be graded: {type(error).__name__}: {error}")
    return row


def _run_cells(path, notebook, scratch, limit, row):
    """What the notebook defines is kept; the row notes how its run ended."""
    exercises = labs.checks_of(row.stem).EXERCISES
    cells, log = notebook.cells_to_run(), Log(scratch / "cells.log")
    (scratch / "task.json").write_text(json.dumps({
        "stem": row.stem, "names": [exercise.name for exercise in exercises], "cells": cells,
        "cell_limit": limit * CELL_SHARE, "predictions": notebook.predictions()}))
    (scratch / "work").mkdir()
    shutil.copy(path, scratch / "work")
    if cells:
        in_time, _ = sandbox.run("run_cells", scratch, log, limit, limit)
        row.notes += _how_it_ended(log.entries(), in_time)
    for entry in log.entries():
        if "unkept" in entry:
            row.set(entry["unkept"], FAILED, f"it can't leave its notebook: {entry['error']}")


def _how_it_ended(entries, in_time):
    begun = [entry["begun"] for entry in entries if "begun" in entry]
    if not begun:
        return ["its process did not start"]
    if not in_time:
        return [f"ran out of time in code cell {begun[-1]}"]
    if not any("finished" in entry for entry in entries):
        return [f"ended its process in code cell {begun[-1]}"]
    errors = [entry for entry in entries if "error" in entry and "cell" in entry]
    return [f"code cell {entry['cell']}: {entry['error']}" for entry in errors[:1]]


def _judge(notebook, scratch, limit, row):
    """Every exercise and prediction of the lab has its state in the row."""
    log = Log(scratch / "verdicts.log")
    kept = {file.stem for file in (scratch / "kept").glob("*.pickle")}
    exercises = {exercise.name: exercise for exercise in labs.checks_of(row.stem).EXERCISES}
    todo = [*notebook.predictions(), *(name for name in exercises if name in kept)]
    quiet_limit = limit * CELL_SHARE
    while todo:
        in_time, seconds = sandbox.run("judge_all", scratch, log, limit, quiet_limit, *todo)
        limit -= seconds
        for entry in log.entries():
            if "name" in entry:
                row.set(entry["name"], entry["state"], entry["reason"])
        todo = [name for name in todo if name not in row.states]
        if todo:  # the first one ended the process, or was still busy; the others go on
            row.set(todo.pop(0), FAILED, "its check ran out of time" if not in_time
                    else "it ended the process that checked it")
    for name in names_of(row.stem):
        if name not in row.states:
            row.set(name, *notebook.why_missing(name))
    row.states = {name: row.states[name] for name in names_of(row.stem)}
    copied = [name for name in exercises if name in kept and notebook.is_copied(exercises[name])]
    if copied:
        names = "every exercise" if len(copied) == len(exercises) else ", ".join(copied)
        row.notes.append(f"same text as the library: {names}")
