"""What an entry of the interview bank must hold: a slip of its author's is one sentence."""

import ast
import builtins

from ranklab.interview.bank import FUNCTIONS, LEVELS
from ranklab.interview.text import fields
from ranklab.interview.units import known_unit

KINDS = ("number", "choice", "open", "design")
NEEDED = ("id", "lab", "level", "kind", "question", "answer")
KNOWN = NEEDED + ("in_lab", "uses", "parameters", "unit", "tolerance", "wrong", "why", "rubric",
                  "levels", "follow_up")


def entry_faults(entry):
    """What is wrong with one entry, one sentence each; an empty list when it is sound."""
    needed = NEEDED
    if entry.get("kind") == "design":
        needed = (*NEEDED[:-1], "rubric", "levels", "follow_up")
    faults = [f"`{key}` is missing" for key in needed if entry.get(key) in (None, "", [], {})]
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
    if kind in ("open", "design"):
        faults = [] if isinstance(rubric, list) and len(rubric) >= 2 else [
            "an open question needs a rubric of two points or more"]
        if kind == "design" and set(entry["levels"]) != set(LEVELS):
            faults.append(f"levels has {', '.join(entry['levels'])}; it needs {', '.join(LEVELS)}")
        return faults
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
    if entry["kind"] == "design":
        texts += [("the answer", text) for text in (*entry["levels"].values(), *entry["follow_up"])]
    elif entry["kind"] != "number":
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
        tree = ast.parse(str(text).strip(), mode="eval")
    except SyntaxError:
        return [f"{what}: '{text}' is not an expression"]
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    known |= FUNCTIONS.keys() | set(dir(builtins))
    return [f"{what} uses {name}, which is no parameter and not under `uses`"
            for name in sorted(used - known)]


def _is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True
