"""The mistakes of a class by their names, and what to say about each in the next lesson.

A mistake's name is the hint that the check gave for it; without a hint, what the check saw. Numbers
are not compared, so the same mistake made by two people counts as one. No sentence is
written here: all come from the checks, the hints and the lab.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

from ranklab.course import labs
from ranklab.course.check import FAILED
from ranklab.course.lesson import places

TOLD = 10  # the most common mistakes, for the next lesson
NUMBER = re.compile(r"""(?<![A-Za-z_\d])[-+]?
                    (?:\d+(?:[,_]\d+)*(?:\.\d+)?(?:e[-+]?\d+)?|(?:nan|inf)\b)%?""", re.I | re.X)
QUOTED = re.compile(r"(?<!\w)'[^']*'(?!\w)")  # and no apostrophe
LIST = re.compile(r"\[?#(?:(?:, | and |, and | to )#)*\]?")


@dataclass
class Common:
    """One mistake of one exercise or prediction: what was seen, its hint, and by whom."""

    stem: str
    name: str
    reason: str
    hint: str
    by: list = field(default_factory=list)

    def to_say(self):
        """Return the mistake's hint, or else the exercise's first hint; for a number, why."""
        exercise, number = labs.find_exercise(self.name), labs.find_prediction(self.name)
        return self.hint or exercise.hints[0] if exercise else number.why or number.hints[0]

    def places(self):
        return places(self.stem, self.name)


def common(rows):
    """List all mistakes: by most submissions first, then in the order of the labs."""
    groups = {}
    for row in rows:
        for name, state in row.states.items():
            if state == FAILED:
                reason, hint = row.reasons[name], row.hints.get(name, "")
                key = row.stem, name, without_numbers(hint or reason)
                groups.setdefault(key, Common(row.stem, name, reason, hint)).by.append(row.name)
    order = {name: place for place, name in enumerate(labs.names())}
    return sorted(groups.values(), key=lambda each: (-len(each.by), order[each.name], each.reason))


def to_tell(mistakes):
    """Select the most common mistakes to discuss. One without a hint needs two people."""
    return [each for each in mistakes if each.hint or len(each.by) > 1][:TOLD]


def without_numbers(text):
    """Replace each number and each list of numbers by #, and what was quoted by ''."""
    return LIST.sub("#", NUMBER.sub("#", QUOTED.sub("''", text)))


def counts(rows, name):
    """Count these rows by state, for one exercise or prediction: {state: how many}."""
    return Counter(row.states[name] for row in rows if name in row.states)
