"""index.json: name, heading and hints of each exercise and prediction, and the questions whose
numbers the library computes. `ranklab build` writes it (index_builder.py).

With it `ranklab status`, `hint` and `questions` answer at once: importing torch takes seconds. A
lab that is being written is looked up in its checks until the next build.
"""

import functools
import json
from pathlib import Path

FILE = Path(__file__).with_name("index.json")


def entries():
    """Return {stem: {name: {"section", "hints", "is_prediction"}}}, in the order of each lab."""
    return read()["labs"]


def questions():
    """Return {id: text} of the interview questions whose text the library must compute."""
    return read()["questions"]


@functools.cache
def read():
    if not FILE.exists():
        return {"labs": {}, "questions": {}}
    return json.loads(FILE.read_text(encoding="utf-8"))


def find(name):
    """Return the entry of this exercise or prediction, or None."""
    return next((lab[name] for lab in entries().values() if name in lab), None)
