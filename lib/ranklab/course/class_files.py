"""The files that grading a class writes: the CSV table, and the report as HTML."""

import csv
from pathlib import Path

from ranklab.basics.files import part_of, whole_file
from ranklab.course import labs
from ranklab.course.class_page import page


class ClassFile:
    """A file that is always complete on disk: with the rows so far, or those of the last run."""

    def __init__(self, path, submissions):
        self.path = Path(path).resolve()
        self.stems = {getattr(notebook, "stem", None) for notebook in submissions.values()}

    def try_place(self):
        """Make the file's folder; return None, or why the file can't be written there."""
        if self.path.exists() and not self.path.is_file():
            return self._problem(f"{self.path} is not a file")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part_of(self.path).touch()
            part_of(self.path).unlink()
        except OSError as error:
            return self._problem(error)

    def write(self, rows):
        """Write these rows to the file, all or none; return None, or why that failed."""
        try:
            with (whole_file(self.path) as part,
                  part.open("w", newline="", encoding="utf-8", errors="replace") as file):
                self._write_to(file, rows)
        except OSError as error:
            return self._problem(error)

    def _problem(self, why):
        return f"the {type(self).__name__.lower()} can't be written: {why}"


class Table(ClassFile):
    """The CSV file."""

    def _write_to(self, file, rows):
        names = [name for stem in labs.STEMS if stem in self.stems for name in labs.names_of(stem)]
        writer = csv.writer(file)
        writer.writerow(["submission", "lab", "passed", "of", "note", *names])
        for row in rows:
            cells = [row.name, row.stem or "", len(row.passed()), len(row.states),
                     "; ".join(row.notes), *(_cell(row, name) for name in names)]
            writer.writerow([_plain(str(cell)) for cell in cells])


class Report(ClassFile):
    """The instructor's HTML file."""

    def _write_to(self, file, rows):
        file.write(page(rows))


def _cell(row, name):
    state, reason = row.states.get(name, ""), row.reasons.get(name, "")
    return f"{state}: {reason}" if reason and name in row.not_passed() else state


def _plain(text):
    """Return a cell's text, changed so that no spreadsheet takes it for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
