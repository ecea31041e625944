"""Numbers as people write them: `150 MB`, `1.5e9`, `3/4`, `2*7/8*100`. Inside, everything is SI."""
import ast
import operator
import re

LARGEST = 1e100  # of a reply: it is multiplied and divided by scales, and may not become infinite
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow,
             ast.USub: operator.neg, ast.UAdd: operator.pos}
PREFIXES = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def _prefixed(*units, size=1):
    """Return {"k" + unit: 1e3 * size, ...} for all prefixes of each unit."""
    return {prefix + unit: factor * size for unit in units for prefix, factor in PREFIXES.items()}


DIMENSIONS = {
    "a count": {"": 1, "%": 0.01, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "bn": 1e9, "G": 1e9,
                "T": 1e12, "x": 1} | dict.fromkeys(
                    ("ranks", "messages", "steps", "rounds", "GPUs", "nodes", "tokens", "elements",
                     "samples", "parameters"), 1),
    "a size": {"bytes": 1, "byte": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
               "bits": 1 / 8} | _prefixed("B") | {"Mb": 1e6 / 8, "Gb": 1e9 / 8} | _prefixed(
                   "bit", size=1 / 8),
    "a time": {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60, "h": 3600, "hours": 3600,
               "days": 86400, "day": 86400, "d": 86400},
    "an amount of work": _prefixed("FLOP", "FLOPs"),
    "a speed": _prefixed("FLOP/s", "FLOPS"),
    "a bandwidth": _prefixed("B/s") | _prefixed("bit/s", size=1 / 8) | {
        "Mb/s": 1e6 / 8, "Gb/s": 1e9 / 8, "Gbps": 1e9 / 8},
    "an intensity": {"FLOP/B": 1, "FLOP/byte": 1, "FLOPs/byte": 1},
    "money": {"USD": 1, "$": 1, "dollars": 1},
}


def known_unit(unit):
    """Return whether the bank may ask for a number in `unit`."""
    return any(unit in names for names in DIMENSIONS.values())


def dimension(unit):
    """Return the dimension of `unit`; counts take precedence over sizes, except for B itself."""
    if unit == "B":  # 7B is seven billion only where a count is asked
        return "a size"
    return next(name for name, units in DIMENSIONS.items() if unit in units)


def scale(unit):
    """Return the size of one `unit` in SI units."""
    return DIMENSIONS[dimension(unit)][unit]


def show(value, unit=""):
    """Return the SI `value` written in `unit`: 1.5e8 and "MB" give "150 MB"."""
    number = value / scale(unit)
    if abs(number - round(number)) <= 1e-9 * abs(number) and abs(number) < 1e12:
        text = f"{round(number):,}"
    elif 1e-3 <= abs(number) < 1e9:
        text = f"{float(f'{number:.4g}'):,}".removesuffix(".0")      # four digits: 134,800
    else:
        mantissa, exponent = f"{number:.3e}".split("e")
        text = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    gap = "" if unit in ("", "%", "x") else " "
    return f"{text}{gap}{unit}"


def read_number(text, unit=""):
    """Return the SI value of `text` as an answer to a question that asks for `unit`.

    Raises ValueError, one sentence, if it is not a number or has a different dimension.
    """
    text = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", text.strip()).lstrip("~").replace("^", "**")
    if re.search(r"\d,\d", text):
        raise ValueError(f"'{text}' has a comma where there should be a point, as in 1.5")
    number, suffix = _split(text)
    try:
        value = _computed(ast.parse(number, mode="eval").body)
        too_large = abs(value) > LARGEST
    except (ArithmeticError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        raise ValueError(f"I cannot read '{text[:40]}' as a number: try 1.5e9, 150 MB or 3/4"
                         ) from None
    if too_large:
        raise ValueError(f"'{text[:40]}' is too large: nothing here is beyond {LARGEST:g}")
    if suffix:
        return value * _suffix_scale(suffix, unit)
    bare_fraction = unit == "%" and "/" in number  # 3/4 of 100%, not 0.75%
    return value * (1 if bare_fraction else scale(unit))


def _computed(node):
    """Evaluate a syntax tree of numbers and operators to a float; nothing else is run.

    Floats overflow where integers would grow until memory runs out: 9**9**9.
    """
    if isinstance(node, ast.Constant):
        return float(node.value)
    if isinstance(node, ast.UnaryOp):
        return OPERATORS[type(node.op)](_computed(node.operand))
    if isinstance(node, ast.BinOp):
        return float(OPERATORS[type(node.op)](_computed(node.left), _computed(node.right)))
    raise TypeError(f"{type(node).__name__} is no arithmetic")


def _split(text):
    """Return `text` as (arithmetic, unit): "2*7/8*100 MB" -> ("2*7/8*100", "MB")."""
    if text.startswith("$"):
        text = text[1:] + "$"
    one = r"(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
    match = re.fullmatch(rf"((?:{one}|[-+*/()\s])*)(.*)", text)
    return match.group(1).strip(), match.group(2).strip()


def _suffix_scale(suffix, unit):
    """Return the size of the unit `suffix`, regardless of case."""
    expected = dimension(unit)
    sizes = DIMENSIONS[expected]
    for name in (suffix, *(name for name in sizes if name.lower() == suffix.lower())):
        if name in sizes:
            return sizes[name]
    for name, units in DIMENSIONS.items():
        if any(suffix.lower() == entry.lower() for entry in units):
            raise ValueError(f"'{suffix}' measures {name}; the question asks for {expected}"
                             + (f" in {unit}" if unit else ""))
    raise ValueError(f"I do not know the unit '{suffix}'"
                     + (f"; the question asks for {unit}" if unit else ""))
