"""Computes what somebody typed, such as `3/4 * 150e6`: numbers, given names and given functions.

The text is read with `ast` and walked, never given to eval: it may come from anybody's notebook.
"""

import ast
import math
import operator
from numbers import Real
from types import SimpleNamespace

UNARY = {ast.USub: operator.neg, ast.UAdd: operator.pos}
FUNCTIONS = {"min": min, "max": max, "abs": abs, "ceil": math.ceil, "floor": math.floor,
             "log2": math.log2, "sqrt": math.sqrt}
BITS = 4096  # of a whole number that may be reached: far more than a float can hold


class NotArithmetic(ValueError):
    """The text is no arithmetic, or can't be computed; the message is one sentence."""


def power(base, exponent):
    """base ** exponent; refused where it is huge: 9**9**9 would compute until the machine gives up.
    """
    whole = isinstance(base, int) and isinstance(exponent, int)  # floats can't grow
    if whole and base.bit_length() * abs(exponent) > BITS:
        raise NotArithmetic(f"the exponent {exponent} is too large")
    return base ** exponent


BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
          ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
          ast.Pow: power}


def compute(text, names=()):
    """The value of `text`; `names` maps names to numbers, functions and namespaces of these."""
    try:
        return _value(ast.parse(str(text).strip(), mode="eval").body, {**FUNCTIONS, **dict(names)})
    except NotArithmetic:
        raise
    except (ArithmeticError, SyntaxError, TypeError, ValueError, RecursionError,
            MemoryError) as why:
        raise NotArithmetic(f"'{str(text)[:60]}' can't be computed: {why}") from None


def _value(node, names):
    match node:
        case ast.Constant() if isinstance(node.value, Real):
            return node.value
        case ast.Name() if node.id in names:
            return names[node.id]
        case ast.Attribute() if not node.attr.startswith("_"):
            owner = _value(node.value, names)
            if isinstance(owner, SimpleNamespace) and hasattr(owner, node.attr):
                return getattr(owner, node.attr)
        case ast.UnaryOp() if type(node.op) in UNARY:
            return UNARY[type(node.op)](_number(node.operand, names))
        case ast.BinOp() if type(node.op) in BINARY:
            left, right = _number(node.left, names), _number(node.right, names)
            return BINARY[type(node.op)](left, right)
        case ast.Call() if not node.keywords:
            function = _value(node.func, names)
            if callable(function):
                return function(*(_number(each, names) for each in node.args))
    raise NotArithmetic(f"'{ast.unparse(node)[:60]}' is no arithmetic")


def _number(node, names):
    value = _value(node, names)
    if not isinstance(value, Real):
        raise NotArithmetic(f"'{ast.unparse(node)[:60]}' is no number")
    return value
