"""The bank: the questions in the YAML files next to this one. Its rules are in tests/bank_rules.py.

    - id: shard-largest              # unique over all files, kebab-case
      lab: 00_ranks                  # the lab that teaches it
      level: 2                       # 1 a first screening ... 5 a specialist's follow-up
      kind: number                   # number, choice, open, or design: a system-design question
      in_lab: true                   # also shown in the lab (3 to 8 a lab)
      uses: [ranks]                  # the ranklab modules that the expressions may call
      parameters:                    # drawn in order: list, range, expression over earlier ones
        n: {from: 1000, to: 2000}
        size: [3, 7]
      question: "{n:,} samples over {size} ranks. ..."
      answer: len(ranks.shard_range(n, 0, size))     # in SI units; a text for the other kinds
      unit: samples                  # the unit in which to reply
      tolerance: 0.01                # relative; 0 = exactly
      wrong:                         # common wrong answers, and what each confuses
        - {answer: n // size, confuses: "..."}
      why: "one or two sentences; {answer} is the right number"
      rubric: [...]                  # open and design: the points of a good answer
      levels: {junior: ..., senior: ..., staff: ...}   # design: an answer at each level
      follow_up: [...]               # design: next questions; both form its answer
"""
import functools
import importlib
import math
from dataclasses import dataclass
from pathlib import Path

import yaml


FUNCTIONS = {"ceil": math.ceil, "floor": math.floor, "log2": math.log2, "sqrt": math.sqrt}

LEVELS = ("junior", "senior", "staff")  # engineers, in a design


@dataclass(frozen=True)
class Question:
    """One entry of the bank, checked."""

    id: str
    lab: str
    level: int
    kind: str
    question: str
    answer: str
    parameters: dict
    unit: str = ""
    tolerance: float = 0.01
    wrong: tuple = ()            # of (expression or text, what it confuses)
    rubric: tuple = ()
    why: str = ""
    uses: tuple = ()
    in_lab: bool = False


@functools.cache
def load():
    """Load every question of the bank, in file order."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it is built
    files = sorted(Path(__file__).parent.glob("*.yaml"))
    return tuple(question(entry) for file in files
                 for entry in yaml.load(file.read_text(encoding="utf-8"), loader))


def question(entry):
    """Make a Question of an entry as read from YAML."""
    entry = dict(entry)
    levels, follow_up = entry.pop("levels", None), entry.pop("follow_up", ())
    return Question(**entry | {
        "answer": _three_answers(levels, follow_up) if levels else str(entry["answer"]).strip(),
        "parameters": entry.get("parameters") or {},
        "wrong": tuple((str(item["answer"]).strip(), item["confuses"])
                       for item in entry.get("wrong") or ()),
        "rubric": tuple(entry.get("rubric") or ()),
        "uses": tuple(entry.get("uses") or ())})


def _three_answers(levels, follow_up):
    answers = [text for level in LEVELS
               for text in (f"A {level} engineer says:", levels[level].strip())]
    return "\n\n".join([*answers, "Then they ask:", *follow_up])


def modules(uses):
    """Import the ranklab modules named in `uses`; return them by the last part of their name."""
    return {name.split(".")[-1]: importlib.import_module(f"ranklab.{name}") for name in uses}


def evaluate(expression, names):
    """Compute an expression of the bank: plain Python with FUNCTIONS and `names`.

    The bank is ours. A learner's input goes to units.read_number, and never comes here.
    """
    return eval(str(expression).strip(), {**FUNCTIONS, **names})
