"""Evaluates the answers of the bank: arithmetic, names and calls of ranklab's own functions.

An answer such as `len(ranks.shard_range(n, rank, size))` is text in a YAML file. It is read with
`ast` and walked here, never given to eval: a question can compute, but it cannot open a file or
reach torch through a module.
"""
import ast
import math
import operator
import types
from numbers import Real


def total(table):
    """The sum of a dict's values, as of the bytes by category."""
    return sum(table.values())


BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
          ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}
UNARY = {ast.USub: operator.neg, ast.UAdd: operator.pos}
SMALL = {"len": len, "sum": sum, "total": total, "min": min, "max": max, "abs": abs, "round": round,
         "ceil": math.ceil, "floor": math.floor, "log2": math.log2, "sqrt": math.sqrt}
ALLOWED = (ast.Expression, ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.operator,
           ast.unaryop, ast.Call, ast.keyword, ast.Attribute, ast.Subscript, ast.Tuple, ast.List,
           ast.Dict)
BITS = 4096  # of a whole number that an answer may reach: far more than a float can hold
ITEMS = 100_000  # of a list, such as the sizes of a model's parameters


class ExpressionError(ValueError):
    """An expression that cannot be read or may not be run; the message is one sentence."""


def parse(text):
    """The syntax tree of `text`, every node of which is allowed."""
    try:
        tree = ast.parse(str(text).strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # Python's own for 10,000 ((
        raise ExpressionError(f"'{text}' is not an expression") from None
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED):
            kind = type(node).__name__
            raise ExpressionError(f"'{text}' holds a {kind}; only arithmetic, names and calls may")
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            raise ExpressionError(f"'{text}' reaches for the private name {node.attr}")
    return tree.body


def free_names(text):
    """The names in `text` that somebody must supply: parameters and modules."""
    nodes = ast.walk(parse(text))
    return {node.id for node in nodes if isinstance(node, ast.Name)} - SMALL.keys()


def evaluate(text, names):
    """The value of `text`, with `names` (parameters and ranklab modules) filled in."""
    try:
        return _value(parse(text), names)
    except RecursionError:
        raise ExpressionError("this is nested too deeply") from None


def _value(node, names):
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            if node.id not in names and node.id not in SMALL:
                raise ExpressionError(f"nothing here is called {node.id}")
            return names.get(node.id, SMALL.get(node.id))
        case ast.Tuple() | ast.List():
            return [_value(item, names) for item in node.elts]
        case ast.UnaryOp() if type(node.op) in UNARY:
            return UNARY[type(node.op)](_value(node.operand, names))
        case ast.BinOp():
            return _arithmetic(node.op, _value(node.left, names), _value(node.right, names))
        case ast.Dict() if None not in node.keys:      # None stands for **
            return {_value(key, names): _value(item, names)
                    for key, item in zip(node.keys, node.values)}
        case ast.Subscript():
            return _value(node.value, names)[_value(node.slice, names)]
        case ast.Attribute():
            return _attribute(_value(node.value, names), node.attr)
        case ast.Call():
            function = _callable(_value(node.func, names), node)
            keywords = {item.arg: _value(item.value, names) for item in node.keywords}
            return function(*(_value(item, names) for item in node.args), **keywords)
    raise ExpressionError(f"{ast.unparse(node)} is not allowed in an answer")


def _arithmetic(op, left, right):
    if isinstance(op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
        if len(left) * right > ITEMS:  # [0] * 10**10 would fill the memory
            raise ExpressionError(f"a list of {len(left) * right} items is too long")
        return left * right
    if not (isinstance(left, Real) and isinstance(right, Real)):
        raise ExpressionError("this computes with something that is no number")
    power = isinstance(op, ast.Pow)
    if not power and type(op) not in BINARY:
        raise ExpressionError(f"the operator {type(op).__name__} is not allowed in an answer")
    if power and _is_huge(left, right):  # 9**9**9 would compute until the machine gives up
        raise ExpressionError(f"the exponent {right} is too large")
    try:
        return left ** right if power else BINARY[type(op)](left, right)
    except ZeroDivisionError:  # also 0 ** -1
        raise ExpressionError("this divides by zero") from None
    except OverflowError:
        raise ExpressionError("this number is too large") from None


def _is_huge(base, exponent):
    """True when the power needs more than BITS bits; floats can't grow."""
    whole = isinstance(base, int) and isinstance(exponent, int)
    return whole and base.bit_length() * abs(exponent) > BITS


def _attribute(owner, name):
    if not hasattr(owner, name):
        kind = owner.__name__ if isinstance(owner, types.ModuleType) else type(owner).__name__
        raise ExpressionError(f"{kind} has nothing called {name}")
    value = getattr(owner, name)
    if isinstance(value, types.ModuleType):      # ranks.torch.save would be a way out
        raise ExpressionError(f"{name} is a module; name it under `uses`")
    return value


def _callable(function, node):
    ours = str(getattr(function, "__module__", "")).split(".")[0] == "ranklab"
    if ours or any(function is small for small in SMALL.values()):
        return function
    raise ExpressionError(f"{ast.unparse(node.func)} is not a function of ranklab")
