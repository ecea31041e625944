"""hint and answer: help for an exercise or a prediction, a little more each time it is asked for."""

import inspect
import os

from ranklab.course import labs, progress


def hint(name):
    """One more hint for `name` is printed, below those shown before."""
    item = _find(name)
    if item is None:
        return
    hints = _hints(item)
    with progress.change() as records:
        entry = records.setdefault(item.name, {"state": "-", "tries": 0})
        shown = entry["hints"] = min(entry.get("hints", 0) + 1, len(hints))
    for number, text in enumerate(hints[:shown], start=1):
        print(f"{number}/{len(hints)}  {text}")
    if shown == len(hints):
        print(f'That is all. answer("{item.name}") shows the worked answer.')


def answer(name):
    """The worked answer to `name` is printed, unless RANKLAB_ANSWERS=0 (a class at work)."""
    if os.environ.get("RANKLAB_ANSWERS") == "0":
        print("Answers are turned off in this class. hint() still helps; then ask your instructor.")
        return
    item = _find(name)
    if item is None:
        return
    print(inspect.getsource(item.answer) if hasattr(item, "hints") else _working(item))


def _find(name):
    name = getattr(name, "__name__", name)
    item = labs.find_exercise(name) or labs.find_prediction(name)
    if item is None:
        print(f"No exercise or prediction is called {name!r}.")
    return item


def _hints(item):
    if hasattr(item, "hints"):
        return item.hints
    return (_working(item),)


def _working(prediction):
    return f"{prediction.working} = {prediction.answer():g} {prediction.unit}".rstrip()
