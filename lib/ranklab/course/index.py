"""index.json: name, heading and hints of all that the labs ask, and questions with numbers that
the library computes. `ranklab build` writes it.

With it `ranklab status`, `hint` and `questions` answer at once: importing torch takes seconds. A
lab that is being written is looked up in its checks until the next build.
"""

import functools
import json
from pathlib import Path

from ranklab.files import write_whole

FILE = Path(__file__).with_name("index.json")


def entries():
    """Return {stem: {name: {"section", "hints", "is_prediction"}}}, in the order of each lab."""
    return _read()["labs"]


def questions():
    """Return {id: text} of the interview questions whose text the library must compute."""
    return _read()["questions"]


@functools.cache
def _read():
    if not FILE.exists():
        return {"labs": {}, "questions": {}}
    return json.loads(FILE.read_text(encoding="utf-8"))


def find(name):
    """Return the entry of this exercise or prediction, or None."""
    return next((lab[name] for lab in entries().values() if name in lab), None)


def is_of(root):
    """Return whether the index belongs to the checkout `root`, and not to an installed package."""
    return FILE.parent == root / "lib" / "ranklab" / "course"


def is_current():
    """Return whether the index says what the labs and their checks say now."""
    return FILE.exists() and FILE.read_text(encoding="utf-8") == _text()


def write():
    """Bring the index up to date with the labs' sources and their checks; return whether it was
    not.
    """
    text = _text()
    if FILE.exists() and FILE.read_text(encoding="utf-8") == text:
        return False
    write_whole(FILE, text)
    _read.cache_clear()
    return True


def _text():
    from ranklab.checks.exercise import Prediction  # with torch, which readers do without
    from ranklab.course import labs
    from ranklab.course.outline import asked_by
    from ranklab.interview.ask import draw, text_of
    from ranklab.interview.bank import load

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
