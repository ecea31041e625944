"""hint and answer: help for an exercise or a prediction, a little more each time."""

import inspect
import os

from ranklab.course import index, labs, progress, stubs
from ranklab.checks.exercise import Prediction
from ranklab.course.show import wrap

OFF = "Answers are turned off in this class. "


def hint(name=""):
    """Print one more hint for `name`, an exercise or prediction, below those shown before."""
    name = getattr(name, "__name__", name)
    entry = index.find(name)
    if entry is None and (item := _find(name)):  # of a lab that is being written
        entry = {"hints": item.hints, "is_prediction": isinstance(item, Prediction)}
    if entry is None:
        return
    is_prediction, hints = entry["is_prediction"], entry["hints"]
    if is_prediction and not _are_answers_on():
        hints = hints[:-1]  # the last one is the answer
    with progress.change() as records:
        record = records.setdefault(name, dict(progress.NEW))
        shown = record["hints"] = min(record.get("hints", 0) + 1, len(hints))
    for number, text in enumerate(hints[:shown], start=1):
        print(wrap(f"{number}/{len(hints)}  {text}"))
        if number == 1 and not is_prediction:
            for line in stubs.advice(labs.source(labs.stem_of(name)), name):
                print(wrap(f"     {line}"))
    if shown < len(hints):
        return
    if not _are_answers_on():
        print(f"{OFF}That is all: ask your instructor.")
    elif not is_prediction:
        print(f'That is all. answer("{name}") shows the worked answer.')


def answer(name):
    """Print the worked answer to `name`, unless RANKLAB_ANSWERS=0 (a class at work)."""
    if not _are_answers_on():
        print(f"{OFF}hint() still helps; then ask your instructor.")
        return
    item = _find(name)
    if item is None:
        return
    print(item.hints[-1] if isinstance(item, Prediction) else inspect.getsource(item.answer))


def _find(name):
    name = getattr(name, "__name__", name)
    item = labs.find_exercise(name) or labs.find_prediction(name)
    if item is None:
        near = labs.near(name)
        print(f"No exercise or prediction is called {name!r}. "
              + (f"Did you mean {' or '.join(near)}?" if near else
                 "`ranklab status 02` lists the names in lab 02."))
    return item


def _are_answers_on():
    return os.environ.get("RANKLAB_ANSWERS") != "0"

