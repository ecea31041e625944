"""A hint never guesses: a plain slip in an answer gets its own line and text, and no hint.

Each slip is put at the beginning and at the end of every exercise: of a function, or of the first
and of the last method of a class.
"""

import ast
import inspect
import textwrap

import pytest

from ranklab.checks.prover.slips import compiled
from ranklab.course import labs
from ranklab.course.check import FAILED, judge

SLIPS = {  # what is written, what Python says of it
    "import torch.distributed as tdist; tdist.allreduce(None)": "has no attribute 'allreduce'",
    "[].apend(1)": "'list' object has no attribute 'apend'",
    "1 + None": "unsupported operand type(s) for +: 'int' and 'NoneType'",
    "[1][3]": "list index out of range",
    "gruop": "name 'gruop' is not defined",
    "import trch": "No module named 'trch'",
    "{}['step']": "'step'",
    "1 / 0": "division by zero",
    "len(3)": "object of type 'int' has no len()",
}
EXERCISES = [item for stem in labs.written() for item in labs.checks_of(stem).EXERCISES]
PLACES = "first", "last"
KINDS = [(slip, place) for place in PLACES for slip in SLIPS]
# In `make test` every third exercise gets one of them, each another one.
CASES = [pytest.param(item, *kind, id=f"{item.name}-{'-'.join(kind)}",
                      marks=[pytest.mark.sweep] * bool(i % 3 or i // 3 % len(KINDS) != k))
         for i, item in enumerate(EXERCISES) for k, kind in enumerate(KINDS)]

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("exercise, slip, place", CASES)
def test_a_slip_gets_its_own_line_and_no_hint(exercise, slip, place):
    verdict = judge(exercise, with_slip(exercise.answer, slip, place))
    assert verdict.state == FAILED, verdict
    assert SLIPS[slip] in verdict.mistake.what, verdict
    assert not verdict.mistake.hint, verdict


def with_slip(answer, slip, place):
    """The text of `answer` with the line of `slip` in it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(answer)))
    top, = tree.body
    of_class = [node for node in top.body if isinstance(node, ast.FunctionDef)]
    function = of_class[-(place == "last")] if isinstance(top, ast.ClassDef) else top
    at = 0 if place == "first" else len(function.body) - isinstance(
        function.body[-1], ast.Return | ast.Raise)
    function.body[at:at] = ast.parse(slip).body
    return compiled(answer, ast.unparse(ast.fix_missing_locations(tree)))
