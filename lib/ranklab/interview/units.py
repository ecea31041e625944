"""Numbers as people write them: `150 MB`, `1.5e9`, `3/4`, `2*7/8*100`. Inside, everything is SI."""
import re

from ranklab.interview.arithmetic import NotArithmetic, compute

COUNTS = ("ranks", "messages", "steps", "rounds", "GPUs", "nodes", "tokens", "elements", "samples",
          "parameters", "x")
LARGEST = 1e100  # of a reply: it is multiplied and divided by scales, and may not become infinite
DIMENSIONS = {
    "a count": {"": 1, "%": 0.01, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "bn": 1e9, "G": 1e9,
                "T": 1e12, **{noun: 1 for noun in COUNTS}},
    "a size": {"B": 1, "bytes": 1, "byte": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
               "PB": 1e15, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "bit": 1 / 8,
               "bits": 1 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8, "Mb": 1e6 / 8, "Gb": 1e9 / 8},
    "a time": {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60, "h": 3600, "hours": 3600,
               "days": 86400, "day": 86400, "d": 86400},
    "an amount of work": {"FLOP": 1, "FLOPs": 1, "MFLOP": 1e6, "GFLOP": 1e9, "TFLOP": 1e12,
                          "PFLOP": 1e15, "GFLOPs": 1e9, "TFLOPs": 1e12, "PFLOPs": 1e15},
    "a speed": {"FLOP/s": 1, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15, "FLOPS": 1,
                "GFLOPS": 1e9, "TFLOPS": 1e12, "PFLOPS": 1e15},
    "a bandwidth": {"B/s": 1, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12, "Mbit/s": 1e6 / 8,
                    "Gbit/s": 1e9 / 8, "Mb/s": 1e6 / 8, "Gb/s": 1e9 / 8, "Gbps": 1e9 / 8},
    "an intensity": {"FLOP/B": 1, "FLOP/byte": 1, "FLOPs/byte": 1},
    "money": {"USD": 1, "$": 1, "dollars": 1},
}


def known_unit(unit):
    """True when the bank may ask for a number in `unit`."""
    return any(unit in names for names in DIMENSIONS.values())


def dimension(unit):
    """What `unit` measures; a count before a size, except for B itself."""
    if unit == "B":                  # 7B is seven billion only where a count is asked
        return "a size"
    return next(name for name, units in DIMENSIONS.items() if unit in units)


def scale(unit):
    """How many SI units one `unit` is."""
    return DIMENSIONS[dimension(unit)][unit]


def show(value, unit=""):
    """The SI `value` written in `unit`: 1.5e8 and "MB" give "150 MB"."""
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
    """The SI value that `text` means where an answer in `unit` is asked.
    error  ValueError with one sentence when it is not a number or measures something else
    """
    text = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", text.strip()).lstrip("~").replace("^", "**")
    if re.search(r"\d,\d", text):
        raise ValueError(f"'{text}' has a comma where there should be a point, as in 1.5")
    number, suffix = _split(text)
    try:
        value = compute(number)
        readable = isinstance(value, (int, float)) and not isinstance(value, bool)
        value = float(value) if readable else 0.0
    except (NotArithmetic, OverflowError):  # a whole number may be longer than any float
        readable = False
    if not readable:
        raise ValueError(f"I cannot read '{text[:40]}' as a number: try 1.5e9, 150 MB or 3/4")
    if not abs(value) <= LARGEST:
        raise ValueError(f"'{text[:40]}' is too large: nothing here is beyond {LARGEST:g}")
    if suffix:
        return value * _suffix_scale(suffix, unit)
    bare_fraction = unit == "%" and "/" in number      # 3/4 of 100%, not 0.75%
    return value * (1 if bare_fraction else scale(unit))


def _split(text):
    """`text` as (arithmetic, unit): "2*7/8*100 MB" -> ("2*7/8*100", "MB")."""
    if text.startswith("$"):
        text = text[1:] + "$"
    one = r"(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
    match = re.fullmatch(rf"((?:{one}|[-+*/()\s])*)(.*)", text)
    return match.group(1).strip(), match.group(2).strip()


def _suffix_scale(suffix, unit):
    asked = dimension(unit)
    for same in (lambda a, b: a == b, lambda a, b: a.lower() == b.lower()):
        for name, size in DIMENSIONS[asked].items():
            if same(name, suffix):
                return size
    for name, units in DIMENSIONS.items():
        if any(suffix.lower() == known.lower() for known in units):
            raise ValueError(f"'{suffix}' measures {name}; the question asks for {asked}"
                             + (f" in {unit}" if unit else ""))
    raise ValueError(f"I do not know the unit '{suffix}'"
                     + (f"; the question asks for {unit}" if unit else ""))
