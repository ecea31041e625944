"""The bank: reads the YAML files beside this one, and says in a sentence what is wrong with one.

    - id: shard-largest              # unique over all files, kebab-case
      lab: 00_ranks                  # the lab that teaches it
      level: 2                       # 1 a first screening ... 5 a specialist's follow-up
      kind: number                   # number, choice or open
      in_lab: true                   # shown in the lab's section 8 (3 to 8 a lab)
      uses: [ranks]                  # the ranklab modules that the expressions may call
      parameters:                    # drawn in order: list, range, expression over earlier ones
        n: {from: 1000, to: 2000}
        size: [3, 7]
      question: "{n:,} samples over {size} ranks. ..."
      answer: len(ranks.shard_range(n, 0, size))     # in SI units; a text for the other kinds
      unit: samples                  # what the reader is asked for
      tolerance: 0.01                # relative; 0 = exactly
      wrong:                         # what people answer, and what that confuses
        - {answer: n // size, confuses: "..."}
      why: "one or two sentences; {answer} is the right number"
      rubric: [...]                  # open questions: the points of a good answer
"""
import importlib
from dataclasses import dataclass
from pathlib import Path

import yaml

from ranklab.interview.expression import ExpressionError, free_names
from ranklab.interview.text import fields
from ranklab.interview.units import known_unit

KINDS = ("number", "choice", "open")
NEEDED = ("id", "lab", "level", "kind", "question", "answer")
KNOWN = NEEDED + ("in_lab", "uses", "parameters", "unit", "tolerance", "wrong", "why", "rubric")


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


def load(folder=None):
    """Every question of the bank, in file order.
    error  ValueError: one sentence per fault, each with file, id and what is wrong
    """
    folder = Path(folder) if folder else Path(__file__).parent
    questions, faults, owner = [], [], {}
    for path in sorted(folder.glob("*.yaml")):
        entries, found = read(path)
        faults += found
        for entry in entries:
            name = entry.get("id")
            if name in owner:
                faults.append(f"{path.name}: question '{name}': {owner[name]} has this id already")
            owner.setdefault(name, path.name)
        questions += entries
    if faults:
        raise ValueError("\n".join(faults))
    return tuple(_question(entry) for entry in questions)


def read(path):
    """The entries of one file, and a list of its faults."""
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" near line {mark.line + 1}" if mark else ""
        return [], [f"{path.name}: this is not YAML{where}"]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return [], [f"{path.name}: the file must be a list of questions"]
    faults = []
    for place, entry in enumerate(entries, 1):
        name = f"question '{entry['id']}'" if entry.get("id") else f"question number {place}"
        faults += [f"{path.name}: {name}: {fault}" for fault in entry_faults(entry)]
    return entries, faults


def entry_faults(entry):
    """What is wrong with one entry, one sentence each; an empty list when it is sound."""
    faults = [f"`{key}` is missing" for key in NEEDED if entry.get(key) in (None, "")]
    faults += [f"`{key}` is no field of the bank" for key in entry if key not in KNOWN]
    if faults:
        return faults
    if entry["kind"] not in KINDS:
        return [f"kind is '{entry['kind']}'; it must be one of {', '.join(KINDS)}"]
    if entry["level"] not in (1, 2, 3, 4, 5):
        faults.append(f"level is {entry['level']}; it must be 1, 2, 3, 4 or 5")
    faults += _parameter_faults(entry) + _wrong_faults(entry)
    if not faults:
        faults = _kind_faults(entry) + _text_faults(entry)
    return faults


def modules(uses):
    """The ranklab modules named in `uses`, by the last part of their name."""
    return {name.split(".")[-1]: importlib.import_module(f"ranklab.{name}") for name in uses}


def _question(entry):
    values = dict(entry)
    values["answer"] = str(entry["answer"]).strip()
    values["parameters"] = entry.get("parameters") or {}
    values["wrong"] = tuple((str(item["answer"]).strip(), item["confuses"])
                            for item in entry.get("wrong") or ())
    values["rubric"] = tuple(entry.get("rubric") or ())
    values["uses"] = tuple(entry.get("uses") or ())
    return Question(**values)


def _parameter_faults(entry):
    parameters, earlier, faults = entry.get("parameters") or {}, set(), []
    if not isinstance(parameters, dict):
        return ["parameters must be a mapping from name to values"]
    for name, how in parameters.items():
        if isinstance(how, dict) and {"from", "to"} <= how.keys() <= {"from", "to", "step"}:
            expressions = [str(value) for value in how.values()]
        elif isinstance(how, list) and how:
            expressions = []
            faults += [f"parameter {name} has the text '{value}'; YAML wants 1.0e+9, not 1e9"
                       for value in how if isinstance(value, str) and _is_number(value)]
        elif isinstance(how, (str, int, float)):
            expressions = [str(how)]
        else:
            faults.append(f"parameter {name} must be a list, {{from, to}} or an expression")
            continue
        for text in expressions:
            faults += _expression_faults(f"parameter {name}", text, earlier, entry)
        earlier.add(name)
    return faults


def _wrong_faults(entry):
    wrong = entry.get("wrong") or []
    if not isinstance(wrong, list):
        return ["wrong must be a list"]
    return [f"wrong answer {place} needs `answer` and `confuses`, and nothing else"
            for place, item in enumerate(wrong, 1)
            if not isinstance(item, dict) or set(item) != {"answer", "confuses"}]


def _kind_faults(entry):
    kind, wrong, rubric = entry["kind"], entry.get("wrong") or [], entry.get("rubric")
    if kind == "open":
        return [] if isinstance(rubric, list) and len(rubric) >= 2 else [
            "an open question needs a rubric of two points or more"]
    faults = ["only open questions have a rubric"] if rubric else []
    if kind == "choice":
        if len(wrong) < 2:
            faults.append(f"a choice needs two wrong answers or more; this has {len(wrong)}")
        texts = [str(item["answer"]).strip() for item in wrong] + [str(entry["answer"]).strip()]
        if len(set(texts)) < len(texts):
            faults.append("two of its choices are the same")
        return faults
    if not wrong:
        faults.append("a number needs at least one common wrong answer")
    if not known_unit(entry.get("unit", "")):
        faults.append(f"the unit '{entry['unit']}' is not one that interview/units.py knows")
    tolerance = entry.get("tolerance", 0.01)
    if not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
        faults.append(f"tolerance is {tolerance}; it must be 0 or more and less than 1")
    names = set(entry.get("parameters") or {})
    faults += _expression_faults("the answer", entry["answer"], names, entry)
    names.add("answer")              # a slip is often a factor of the right answer
    for place, item in enumerate(wrong, 1):
        faults += _expression_faults(f"wrong answer {place}", item["answer"], names, entry)
    return faults


def _text_faults(entry):
    texts = [("question", entry["question"]), ("why", entry.get("why") or "")]
    texts += [("a `confuses`", item["confuses"]) for item in entry.get("wrong") or []]
    if entry["kind"] != "number":
        texts += [("the answer", entry["answer"])]
    known, faults = set(entry.get("parameters") or {}), []
    for what, text in texts:
        try:
            extra = fields(str(text)) - known - ({"answer"} if what != "question" else set())
        except ValueError as error:
            faults.append(f"{what} has a brace that is no parameter ({error})")
            continue
        faults += [f"{what} names {{{name}}}, which is no parameter" for name in sorted(extra)]
    return faults


def _expression_faults(what, text, names, entry):
    known = set(names) | {module.split(".")[-1] for module in entry.get("uses") or ()}
    try:
        unknown = free_names(text) - known
    except ExpressionError as error:
        return [f"{what}: {error}"]
    return [f"{what} uses {name}, which is no parameter and not under `uses`"
            for name in sorted(unknown)]


def _is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True
