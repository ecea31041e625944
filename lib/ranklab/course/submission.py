"""One submitted notebook: run in a copy, then judged in processes that it never touched."""

import contextlib
import json
import re
import secrets
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from ranklab.course import labs, sandbox
from ranklab.course.check import FAILED, NOT_WRITTEN, PASSED
from ranklab.course.predicted import judge_number
from ranklab.course.submitted import has_code_of, is_forced

CELL_SHARE = 0.3  # the part of a notebook's limit for one cell, or for the check of one exercise
# If several ranks fail in the same way, chance decides which of them says so first.
FIRST = re.compile(r"\brank \d+( of \d+ (?:raised|lost|was killed|ended)\b)")


@dataclass
class Row:
    """One line of the table: the result of one submission."""

    name: str
    stem: str | None = None
    notes: list = field(default_factory=list)
    states: dict = field(default_factory=dict)  # of each exercise and prediction of its lab
    reasons: dict = field(default_factory=dict)  # why it did not pass
    hints: dict = field(default_factory=dict)  # the hint of the check about that mistake

    def set(self, name, state, reason="", hint=""):
        self.states[name], self.hints[name] = state, hint
        self.reasons[name] = FIRST.sub(r"a rank\1", reason)

    def passed(self):
        return [name for name, state in self.states.items() if state == PASSED]

    def not_passed(self):
        return [name for name, state in self.states.items() if state != PASSED]


def grade_notebook(notebook, name, limit, clean):
    """The row of one notebook. Its cells get `limit` seconds in all, and its checks as many."""
    row = Row(name, notebook.stem)
    if row.stem is None:
        row.notes.append("no exercise of a lab is in it")
        return row
    with tempfile.TemporaryDirectory(prefix="ranklab-", ignore_cleanup_errors=True) as scratch:
        scratch = Path(scratch).resolve()
        try:
            kept = _run_cells(notebook, scratch, limit, row, clean)
            _judge(notebook, kept, scratch, limit, row, clean)
            _note_copies(notebook, kept, row)
        except Exception as error:  # anything else that is strange about it costs only its own row
            row.notes.append(f"could not be graded: {type(error).__name__}: {error}")
    return row


def _run_cells(notebook, scratch, limit, row, clean):
    """{exercise: its object, pickled}; the row notes how the run ended."""
    names = [exercise.name for exercise in labs.checks_of(row.stem).EXERCISES]
    cells = notebook.cells_to_run()
    for folder in ("work", "kept"):
        (scratch / folder).mkdir()
    for name, content in notebook.beside.items():
        (scratch / "work" / name).write_bytes(content)
    if cells:
        task = {"names": names, "cells": cells, "cell_limit": limit * CELL_SHARE}
        lines, in_time, _ = sandbox.run(clean, "run_cells", scratch, json.dumps(task).encode(),
                                        limit, limit)
        entries = list(_entries(lines))
        row.notes += _how_it_ended(entries, in_time)
        for entry in entries:
            if "unkept" in entry:
                row.set(entry["unkept"], FAILED, f"it can't leave its notebook: {entry['error']}")
    files = {name: scratch / "kept" / f"{name}.pickle" for name in names}
    return {name: file.read_bytes() for name, file in files.items() if file.is_file()}


def _entries(lines):
    for line in lines:
        with contextlib.suppress(ValueError):  # a cell wrote into the pipe
            yield json.loads(line)


def _how_it_ended(entries, in_time):
    begun = [entry["begun"] for entry in entries if "begun" in entry]
    if not begun:
        return ["its process did not start"]
    if not in_time:
        return [f"ran out of time in code cell {begun[-1]}"]
    if not any("finished" in entry for entry in entries):
        return [f"ended its process in code cell {begun[-1]}"]
    errors = [entry for entry in entries if "error" in entry and "cell" in entry]
    return [FIRST.sub(r"a rank\1", f"code cell {entry['cell']}: {entry['error']}")
            for entry in errors[:1]]


def _judge(notebook, kept, scratch, limit, row, clean):
    """Every exercise and prediction of the lab has its state in the row."""
    checks, left = labs.checks_of(row.stem), limit
    numbers = notebook.predictions()
    for prediction in checks.PREDICTIONS:
        if prediction.name in numbers:
            row.set(prediction.name, *judge_number(prediction, *numbers[prediction.name]))
    for name in notebook.untouched:
        row.set(name, NOT_WRITTEN)
    for name in [each for each in kept if each not in notebook.untouched]:
        left -= _judge_kept(name, kept[name], scratch, left, limit * CELL_SHARE, row, clean)
    for name in labs.names_of(row.stem):
        if name not in row.states:
            row.set(name, *notebook.why_missing(name))
    row.states = {name: row.states[name] for name in labs.names_of(row.stem)}


def _judge_kept(name, pickled, scratch, limit, quiet_limit, row, clean):
    """The exercise has its state; returns the seconds. Its process can report no other exercise."""
    word = secrets.token_hex(16)
    task = json.dumps([row.stem, name, word]).encode() + b"\n"
    lines, in_time, seconds = sandbox.run(clean, "judge_kept", scratch, task + pickled, limit,
                                           quiet_limit)
    said = [line.split("\t")[1:] for line in lines if line.split("\t")[0] == word]
    if len(said) < len(lines):
        row.notes.append(f"{name} wrote to the grader by itself")
    verdict = next((one for one in said if len(one) == 3), None)
    row.set(name, *verdict or (FAILED, "it ended the process that checked it" if in_time
                               else "its check ran out of time"))
    return seconds


def _note_copies(notebook, kept, row):
    """The row notes which code is the library's, and which can reach the library's or the
    grader."""
    exercises = {one.name: one for one in labs.checks_of(row.stem).EXERCISES if one.name in kept}
    same = [name for name, one in exercises.items() if notebook.has_library_text(one)]
    copied = [name for name in same if not is_forced(exercises[name], row.stem)]
    taken = [name for name, one in exercises.items() if name not in same
             and has_code_of(one, kept[name])]
    for names, note in ((copied, "same text as the library"), (taken, "the library's own code")):
        if names:
            every = len(names) == len(exercises) > 1
            row.notes.append(f"{note}: {'every exercise' if every else ', '.join(names)}")
    if tricks := notebook.tricks():
        row.notes.append(f"read its code: it names {', '.join(tricks)}")
