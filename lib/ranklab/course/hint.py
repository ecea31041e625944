"""hint and answer: help for an exercise or a prediction, a little more each time."""

import inspect
import os

from ranklab.course import labs, progress

OFF = "Answers are turned off in this class. "


def hint(name=""):
    """One more hint for `name`, an exercise or prediction, is printed below those shown before."""
    item = _find(name)
    if item is None:
        return
    is_exercise = hasattr(item, "hints")
    if not is_exercise and not _are_answers_on():
        print(f"{OFF}A prediction has no other hint: ask your instructor.")
        return
    hints = item.hints if is_exercise else (_working(item),)
    with progress.change() as records:
        entry = records.setdefault(item.name, {"state": "-", "tries": 0})
        shown = entry["hints"] = min(entry.get("hints", 0) + 1, len(hints))
    for number, text in enumerate(hints[:shown], start=1):
        print(f"{number}/{len(hints)}  {text}")
    if is_exercise and shown == len(hints) and _are_answers_on():
        print(f'That is all. answer("{item.name}") shows the worked answer.')


def answer(name):
    """The worked answer to `name` is printed, unless RANKLAB_ANSWERS=0 (a class at work)."""
    if not _are_answers_on():
        print(f"{OFF}hint() still helps; then ask your instructor.")
        return
    item = _find(name)
    if item is None:
        return
    print(inspect.getsource(item.answer) if hasattr(item, "hints") else _working(item))


def _find(name):
    name = getattr(name, "__name__", name)
    item = labs.find_exercise(name) or labs.find_prediction(name)
    if item is None:
        print(f"No exercise or prediction is called {name!r}. `ranklab status` lists all names.")
    return item


def _are_answers_on():
    return os.environ.get("RANKLAB_ANSWERS") != "0"


def _working(prediction):
    return f"{prediction.working} = {prediction.answer():g} {prediction.unit}".rstrip()
