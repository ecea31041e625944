"""How many minutes take the exercises that a text names, by what their labs state.

    4.1 to 4.3, 4.5              these exercises, and the lab's reading in proportion
    prediction of 4.4            no more of it than that
    `mfu`, "Half of the norm"    what stands under Further: its own minutes
    whole                        all the minutes that the lab states
"""

import functools
import math
import re

from conftest import ROOT

from ranklab.course import labs

AROUND = 10 + 5  # minutes, in class: the deck before a lab, its questions after it
PREDICTION = 2


@functools.cache
def stated(stem):
    """The lab's minutes with all that it counts, without Further, and those of each exercise."""
    source = (ROOT / "labs" / "source" / f"{stem}.py").read_text()
    box = re.search(r"^# > (\d+) minutes(?:.*?, (\d+) without .*Further)?", source, re.M)
    boxes = re.findall(r"^# #{3,4} (.*)\n# > difficulty .*?(\d+) minutes", source, re.M)
    return int(box[1]), int(box[2] or box[1]), {_name(title): int(took) for title, took in boxes}


def _name(title):
    """Of an exercise: its number, or the function in its title, or the title of a case."""
    return re.match(r"4\.\d|(?=.*`(\w+)`)|.*", title)[1] or re.match(r"4\.\d|.*", title)[0]


def minutes(stem, text):
    """What `text` names of the lab, in minutes."""
    whole, base, exercises = stated(labs.find_stem(stem))
    if "whole" in text:
        return whole
    core = sum(took for name, took in exercises.items() if name.startswith("4."))
    found = sum(exercises[name] for name in re.findall('["`]([^"`]+)["`]', text))
    for clause in text.split(";"):
        names = [*sections(clause)]
        found += PREDICTION * len(names) if "prediction" in clause else \
            sum(exercises[name] for name in names) * base / core
    return found


def sections(text):
    """ "4.1 to 4.3, 4.5" -> 4.1, 4.2, 4.3, 4.5"""
    for first, last in re.findall(r"\b4\.(\d)(?: to 4\.(\d))?", text):
        yield from (f"4.{n}" for n in range(int(first), int(last or first) + 1))


def up_to_five(found):
    """Agendas and paths count in steps of five minutes."""
    return math.ceil(found / 5 - 1e-9) * 5


def slot(stem, text):
    """The minutes of a lab in class; a case of lab 16 has no deck of its own."""
    return up_to_five(minutes(stem, text) + (0 if text.startswith("case") else AROUND))
