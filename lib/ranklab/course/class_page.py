"""The instructor's report of a class: one HTML file that needs no server.

It shows what to teach next, who passed what in each lab, every mistake, and the notes.
"""

from pathlib import Path

from ranklab.course import labs
from ranklab.course.check import FAILED, LIBRARYS, NOT_WRITTEN, PASSED
from ranklab.course.mistakes import common, counts, to_tell
from ranklab.course.outline import outline
from ranklab.course.tags import Html, safe, tag

MARKS = {PASSED: "\N{CHECK MARK}", FAILED: "\N{BALLOT X}", NOT_WRITTEN: "\N{MIDDLE DOT}",
         LIBRARYS: "="}
NAMES_SHOWN = 12


def page(rows):
    """Return the whole file. The same rows give the same bytes."""
    mistakes = common(rows)
    body = [_head(rows), _lesson(mistakes), *(_lab(stem, rows) for stem in _stems(rows)),
            _all_mistakes(mistakes), _notes(rows)]
    template = Path(__file__).with_name("class_page.html").read_text(encoding="utf-8")
    return template.replace("{{body}}", safe(body))


def _stems(rows):
    return [stem for stem in labs.STEMS if stem in {row.stem for row in rows}]


def _head(rows):
    total = sum(len(row.states) for row in rows)
    count = sum(len(row.passed()) for row in rows)
    sentences = [f"{_count(len(rows), 'submission')}, {_count(len(_stems(rows)), 'lab')}; "
                 f"{count} of {total} exercises and numbers are passed."]
    return tag("header", tag("h1", "The class"), tag("p", *sentences))


def _count(number, noun):
    return f"{number} {noun}{'s' * (number != 1)}"


# --- what to say ----------------------------------------------------------------------------------

def _lesson(mistakes):
    items = [tag("li", _title(each), tag("p", _seen(each), class_="seen"),
                 tag("p", tag("b", "Say: "), each.to_say()),
                 tag("p", tag("b", "Show again: "), "; ".join(places), class_="places")
                 if (places := each.places()) else "") for each in to_tell(mistakes)]
    return tag("section", tag("h2", "What to say in the next lesson"),
               tag("ol", *items, class_="lesson") if items else tag("p", "No mistake was found."))


def _title(mistake):
    return tag("h3", tag("code", mistake.name), " ",
               tag("span", _count(len(mistake.by), "submission"), class_="times"))


def _seen(mistake):
    return [tag("b", "The check said: "), mistake.reason]


# --- one lab --------------------------------------------------------------------------------------

def _lab(stem, rows):
    rows = [row for row in rows if row.stem == stem]
    items = outline(stem)
    lines = [tag("tr", tag("th", tag("code", one.name), scope="row"), tag("td", one.section),
                 *_numbers(counts(rows, one.name))) for one in items]
    heads = ["Exercise", "In", "Passed", "Not written", "Failed", "Other"]
    return tag("section", tag("h2", f"Lab {stem[:2]}: {labs.idea(stem).replace('_', ' ')}"),
               _table(heads, lines, "counts"), _matrix(items, rows))


def _numbers(tally):
    rest = sum(tally.values()) - tally[PASSED] - tally[NOT_WRITTEN] - tally[FAILED]
    numbers = (tally[PASSED], tally[NOT_WRITTEN], tally[FAILED], rest)
    kinds = ("passed", "stub", "failed", "other")
    return [tag("td", number or "", class_=f"n {kind if number else ''}".rstrip(),
                style=f"--share: {number / max(1, sum(numbers)):.2f}")
            for number, kind in zip(numbers, kinds)]


def _matrix(items, rows):
    heads = ["Submission", *(tag("span", one.name) for one in items)]
    lines = [tag("tr", tag("th", _short(row), scope="row"),
                 *(_mark(row, one.name) for one in items)) for row in rows]
    key = ", ".join(f"{mark} {state}" for state, mark in MARKS.items())
    return [_table(heads, lines, "matrix"), tag("p", key, class_="key")]


def _mark(row, name):
    state = row.states.get(name, "")
    kind = {PASSED: "passed", FAILED: "failed", NOT_WRITTEN: "stub"}.get(state, "other")
    return tag("td", MARKS.get(state, ""), class_=f"mark {kind}",
               title=": ".join(filter(None, (name, state, row.reasons.get(name)))))


def _short(row):
    return row.name.removesuffix(".ipynb")


def _table(heads, lines, class_):
    head = tag("tr", *(tag("th", each, scope="col") for each in heads))
    return tag("div", tag("table", tag("thead", head), tag("tbody", *lines), class_=class_),
               class_="scroll", tabindex=0)


# --- all mistakes, all notes ----------------------------------------------------------------------

def _all_mistakes(mistakes):
    items = [tag("li", _title(each), tag("p", _seen(each), class_="seen"),
                 tag("p", each.hint) if each.hint else "",
                 tag("p", tag("b", "By: "), _names(each.by), class_="by")) for each in mistakes]
    return tag("section", tag("h2", "All mistakes"),
               tag("ol", *items) if items else tag("p", "There is none."))


def _names(names):
    stems = [name.removesuffix(".ipynb") for name in names[:NAMES_SHOWN]]
    rest = [f"{len(names) - NAMES_SHOWN} more"] if len(names) > NAMES_SHOWN else []
    return ", ".join(stems + rest)


def _notes(rows):
    items = [tag("li", tag("b", _short(row)), ": ", "; ".join(row.notes))
             for row in rows if row.notes]
    heading = tag("h2", "Look at these yourself")
    return tag("section", heading, tag("ul", *items)) if items else Html()
