"""The report of an interview, as Markdown: points by lab, which lab to open, what was missed."""

import textwrap

from ranklab.course.drill import LETTERS, value_of
from ranklab.interview.ask import SHARE, judge


def clock_time(seconds):
    """Format seconds as minutes and seconds, such as 4:05."""
    return f"{round(seconds) // 60}:{round(seconds) % 60:02}"


def report(sheet, rows):
    """Return the report of an interview.

    `rows`: a list of (entry of the sheet, question, the question as it was asked)
    """
    scored = [each for each in rows if each[0]["mark"] is not None]
    points, seconds = sum(entry["mark"] for entry, _, _ in scored), sum(
        entry["seconds"] for entry, _, _ in rows)
    lines = [f"# Mock interview of {sheet['begun']}", "",
             f"Level {sheet['level']}, {clock_time(seconds)} of {sheet['minutes']:g} minutes. "
             f"{len(scored)} of {len(rows)} questions are scored: {points:.1f} points."]
    lines += _by_lab(scored) + _missed(scored)
    waiting = [question.id for entry, question, _ in rows
               if entry["reply"] is not None and entry["mark"] is None]
    unseen = [question.id for entry, question, _ in rows if entry["reply"] is None]
    if waiting:
        lines += ["", f"Not scored yet: {', '.join(waiting)}. `ranklab interview --score` goes on."]
    if unseen:
        lines += ["", f"Not answered: {', '.join(unseen)}."]
    return "\n".join(textwrap.fill(line, 96, subsequent_indent="  ") for line in lines) + "\n"


def _by_lab(scored):
    of_lab = {}
    for entry, question, _ in scored:
        of_lab.setdefault(question.lab, []).append(entry["mark"])
    weakest = sorted(of_lab, key=lambda lab: (sum(of_lab[lab]) / len(of_lab[lab]), lab))
    lines = ["", "| lab | questions | points |", "|---|---|---|"] if scored else []
    lines += [f"| {lab} | {len(of_lab[lab])} | {sum(of_lab[lab]):.1f} |" for lab in weakest]
    weak = [lab for lab in weakest if sum(of_lab[lab]) < SHARE * len(of_lab[lab])]
    if weak:
        lines += ["", "## Open these labs, the weakest first", ""]
        lines += [f"- {lab}; then `ranklab drill --lab {lab[:2]} --weak`" for lab in weak]
    return lines


def _missed(scored):
    lines = ["", "## What was missed"] if any(entry["mark"] < 1 for entry, _, _ in scored) else []
    for entry, question, item in scored:
        if entry["mark"] < 1:
            lines += ["", f"{question.id} ({question.lab}, level {question.level}): "
                      f"{entry['mark']:.1f} points, {clock_time(entry['seconds'])} of "
                      f"{clock_time(entry['share'])}", ""]
            lines += [f"- {point}" for point in entry["missed"] or [_right(item, entry["reply"])]]
    return lines


def _right(item, reply):
    """Return the right answer, and what the reply confuses."""
    letter = f"{LETTERS[item.options.index(item.answer)]}) " if item.options else ""
    confuses = judge(item, value_of(item, reply))[1] if reply else ""
    right = item.shown_answer().removesuffix(".")
    return " ".join(f"It is {letter}{right}. {confuses}".split())


def transcript(rows):
    """Return all questions, each with the reply and a good answer."""
    parts = ["## All questions"]
    for entry, question, item in rows:
        options = [f"{letter}) {option}" for letter, option in zip(LETTERS, item.options)]
        reply = entry["reply"] or ("passed" if entry["reply"] == "" else "not answered")
        parts += [f"### {question.id}", item.text, *options,
                  "\n".join(f"> {line}" for line in reply.splitlines())]
        if entry["reply"] is not None:
            parts += [_right(item, "") if not item.rubric else item.answer, item.why]
    return "\n\n".join(filter(None, parts)) + "\n"
