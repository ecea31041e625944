"""Writes index.json, from the labs' sources, their checks and the interview questions."""

import json

from ranklab.basics.files import write_whole
from ranklab.checks.exercise import Prediction
from ranklab.course import labs
from ranklab.course.index import FILE, read
from ranklab.course.outline import asked_by
from ranklab.interview.ask import draw, text_of
from ranklab.interview.bank import load


def is_of(root):
    """Return whether the index belongs to the checkout `root`, and not to an installed package."""
    return FILE.parent == root / "lib" / "ranklab" / "course"


def is_current():
    """Return whether the index agrees with the labs and their checks."""
    return FILE.exists() and FILE.read_text(encoding="utf-8") == _text()


def write():
    """Bring the index up to date with the labs' sources and their checks.

    Returns: whether it changed
    """
    text = _text()
    if FILE.exists() and FILE.read_text(encoding="utf-8") == text:
        return False
    write_whole(FILE, text)
    read.cache_clear()
    return True


def _text():
    texts = {question.id: draw(question).text for question in load() if text_of(question) is None}
    whole = {}
    for stem in labs.written():
        checks = labs.checks_of(stem)
        items = {item.name: item for item in (*checks.EXERCISES, *checks.PREDICTIONS)}
        whole[stem] = {
            each.name: {"section": each.section, "hints": list(items[each.name].hints),
                        "is_prediction": isinstance(items[each.name], Prediction)}
            for each in asked_by(labs.source(stem), list(items))}
    return json.dumps({"labs": whole, "questions": texts}, indent=1) + "\n"
