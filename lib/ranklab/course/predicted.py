"""The numbers that a notebook predicts: its text is evaluated, and nothing of it is run.

So no number can come from the library's own answer. Arithmetic counts, functions of `math`, and
names to which the notebook gave such a number. Anything else is "not gradable", and never wrong.
"""

import ast
import math
from types import SimpleNamespace

from ranklab.course.check import FAILED, judge_prediction
from ranklab.course.names import bound_names
from ranklab.interview.arithmetic import NotArithmetic, compute, power

NOT_GRADABLE = "not gradable"
BITS = 4096  # of a whole number; names could otherwise double it line by line


def _round(number, digits=0):
    return round(number, max(digits, -400) or None)  # 10 ** -digits is computed in full


MATH = {name: item for name, item in vars(math).items() if not name.startswith("_")
        and name not in ("factorial", "comb", "perm")}
GIVEN = {"math": SimpleNamespace(**MATH), "round": _round,
         "int": int, "float": float, "pow": power}


def predictions(trees, wanted):
    """{name: (text, value)} of each number in a check(...), the last one that is not `...`.

    The value is a NotArithmetic where it can't be had without running the notebook.
    """
    names, found = dict(GIVEN), {}
    for statement in (node for tree in trees for node in tree.body):
        for call in ast.walk(statement):
            function = getattr(call, "func", None)  # check(...), or ranklab.check(...)
            if "check" in (getattr(function, "id", ""), getattr(function, "attr", "")):
                for keyword in call.keywords:
                    text = ast.unparse(keyword.value)
                    if keyword.arg in wanted and text not in ("...", "None"):
                        found[keyword.arg] = text, _value(keyword.value, names)
        _bind(statement, names)
    return found


def judge_number(prediction, text, value):
    """(state, reason, what it confuses or "") of a predicted number."""
    if isinstance(value, NotArithmetic):
        return NOT_GRADABLE, f"{text[:60]} is not plain arithmetic", ""
    state, line = judge_prediction(prediction, value)
    confusions = (prediction.mistakes or {}).values() if state == FAILED else ()
    confusion = next((text for text in confusions if line.endswith(f": {text}")), "")
    return state, line[6:].partition("\n")[0], confusion


def _value(node, names):
    try:
        value = compute(ast.unparse(node), names)
        if isinstance(value, int) and value.bit_length() > BITS:
            raise NotArithmetic("the number is too large")
        return value
    except Exception as error:  # whatever it is, it is not arithmetic
        return NotArithmetic(str(error))


def _bind(statement, names):
    """`names` holds what the statement binds, or lacks it where that can't be told."""
    given = dict(names)
    for name in bound_names(ast.unparse(statement)):
        names.pop(name, None)
    match statement:
        case ast.Import():
            new = {item.asname or item.name: given["math"] for item in statement.names
                   if item.name == "math"}
        case ast.ImportFrom(module="math"):
            new = {item.asname or item.name: MATH[item.name] for item in statement.names
                   if item.name in MATH}
        case ast.Assign(targets=[*targets]):
            new = {name: _value(node, given) for target in targets
                   for name, node in _pairs(target, statement.value)}
        case _:
            new = {}
    names |= {name: value for name, value in new.items() if not isinstance(value, NotArithmetic)}


def _pairs(target, value):
    match target, value:
        case ast.Name(), _:
            yield target.id, value
        case ast.Tuple(), ast.Tuple() if len(target.elts) == len(value.elts):
            for one, its_value in zip(target.elts, value.elts):
                yield from _pairs(one, its_value)
