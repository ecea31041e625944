"""One submitted notebook and its row in the table of the class."""

import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from ranklab.course import labs, progress
from ranklab.course.check import FAILED, NOT_WRITTEN, PASSED
from ranklab.course.rerun import Rerun

# If several ranks fail in the same way, any of them may report first.
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


def grade_notebook(notebook, name, seconds):
    """Run the notebook once more, for `seconds` at most; return its row."""
    row = Row(name, notebook.stem)
    if row.stem is None:
        row.notes.append("no exercise of a lab is in it")
        return row
    with tempfile.TemporaryDirectory(prefix="ranklab-", ignore_cleanup_errors=True) as folder:
        try:
            rerun = Rerun(notebook, Path(folder).resolve(), seconds)
        except Exception as error:  # whatever is strange about it costs only its own row
            row.notes.append(f"could not be graded: {type(error).__name__}: {error}")
            return row
    for exercise in labs.names_of(row.stem):
        row.set(exercise, *_verdict(exercise, notebook, rerun))
    _note_problem(rerun, row)
    _note_copies(notebook, row)
    return row


def _verdict(name, notebook, rerun):
    """(state, reason, hint) of an exercise or a prediction."""
    if name in notebook.untouched:
        return NOT_WRITTEN, "", ""
    record = rerun.records.get(name, progress.NEW)
    if record["tries"]:
        return record["state"], record["reason"], record["advice"]
    if name in rerun.problems:
        return FAILED, f"it {rerun.problems[name]}", ""
    if name in notebook.sources:
        return (NOT_WRITTEN, "", "") if rerun.seconds_left > 0 else (
            FAILED, "there was no time left to check it", "")
    return *notebook.why_missing(name), ""


def _note_problem(rerun, row):
    """Note the first problem of a cell: later ones often follow from it."""
    cell, problem = next(((step, problem) for step, problem in rerun.problems.items()
                          if step.startswith("code cell")), ("", ""))
    if problem:
        row.notes.append(FIRST.sub(r"a rank\1", f"{cell} {problem}"))
    if rerun.seconds_left <= 0:
        row.notes.append("ran out of time")


def _note_copies(notebook, row):
    """Note the exercises whose text is the library's."""
    exercises = [one for one in labs.checks_of(row.stem).EXERCISES
                 if one.name in notebook.sources]
    copied = [one.name for one in exercises if notebook.has_library_text(one)]
    if copied:
        is_every = len(copied) == len(exercises) > 1
        row.notes.append("same text as the library: "
                         + ("every exercise" if is_every else ", ".join(copied)))
