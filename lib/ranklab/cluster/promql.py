"""PromQL expressions evaluated without a server: the part of PromQL that alert rules use.

promql-parser parses them. Ranges are closed on both sides, as in Prometheus 2. A test compares
everything here with promtool. A NotCovered names what is not covered.
"""

import math
import operator
import re
import statistics
from bisect import bisect_left, bisect_right
from functools import partial
from importlib.util import find_spec

STALE = None  # the value of a sample that marks the end of the series, or a failed scrape
LOOKBACK = 300  # seconds for which a sample counts where none is newer
NAME = "__name__"


class NotCovered(Exception):
    """This may be valid PromQL, but this module does not support it."""


def missing(*names):
    """Say how to install the missing ones of `names` and promql_parser; "" if none is missing."""
    lacks = [name for name in names or ["promql_parser"] if not find_spec(name)]
    return lacks and (f"needs {' and '.join(lacks)}: python -m pip install -c constraints.txt -e "
                      "'.[cluster]'").replace("_", "-") or ""


def parse(text):
    """Parse the expression.

    Raises: ValueError that says what is wrong with it; RuntimeError if promql_parser is missing.
    """
    if missing():
        raise RuntimeError(missing())
    from promql_parser import parse

    return parse(text)


def quantile(q, values):
    """Compute a quantile, linear between the two nearest values; infinite for q outside 0 .. 1.
    """
    if not 0 <= q <= 1:
        return math.copysign(math.inf, q - 0.5)
    ordered, at = sorted(values), q * (len(values) - 1)
    low = math.floor(at)
    return ordered[low] * (low + 1 - at) + ordered[min(low + 1, len(ordered) - 1)] * (at - low)


def divide(a, b):
    return a / b if b else math.nan if not a or math.isnan(a) else math.copysign(math.inf, a)


def remainder(a, b):
    return math.fmod(a, b) if b and math.isfinite(a) else math.nan


def power(a, b):
    try:
        return math.pow(a, b)
    except ValueError:
        return math.nan
    except OverflowError:
        return math.inf


def rounded(x, to=1.0):
    return math.floor(x / to + 0.5) * to if math.isfinite(x) else x


ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": divide,
              "%": remainder, "^": power}
COMPARE = {"==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt,
           ">=": operator.ge, "<=": operator.le}
REDUCE = {"sum": sum, "min": min, "max": max, "avg": statistics.fmean, "count": len,
          "stddev": statistics.pstdev, "stdvar": statistics.pvariance, "group": lambda _: 1,
          "present": lambda _: 1, "last": lambda values: values[-1]}
NUMBERS = {"abs": abs, "clamp_min": max, "clamp_max": min, "round": rounded, "sgn":
           lambda x: (x > 0) - (x < 0), "ceil": math.ceil, "floor": math.floor, "clamp":
           lambda x, low, high: max(low, min(high, x))}
RANKED = {"topk": True, "bottomk": False}  # of a group: do the largest stay?


class Evaluator:
    """When called, evaluate a parsed expression at a given time.

    series: {labels: [(seconds, value), ...]}, labels a frozenset of (name, value) with __name__
    step: seconds between evaluations: the default step of subqueries
    Returns: a float, {labels: float}, or for a range {labels: [(seconds, value), ...]}.
    Raises: NotCovered.
    """

    def __init__(self, series, step=15):
        self.series, self.step = series, step
        self.subqueries = {}  # (node, number of the step) -> its vector
        self.times = {labels: [time for time, _ in points] for labels, points in series.items()}

    def __call__(self, node, t):
        evaluate = getattr(self, type(node).__name__, None)
        if evaluate is None or getattr(node, "at", None):
            raise NotCovered(f"`{node}` is PromQL that this check does not know")
        return evaluate(node, t)

    def NumberLiteral(self, node, t):
        return node.val

    def ParenExpr(self, node, t):
        return self(node.expr, t)

    def UnaryExpr(self, node, t):  # only minus is one
        value = self(node.expr, t)
        if isinstance(value, float):
            return -value
        return without_name({labels: -x for labels, x in value.items()})

    def samples(self, node, start, end):
        """Return {labels: samples from start to end} for a selector."""
        matchers = [(m.name, str(m.op), m.value) for m in node.matchers.matchers]
        if node.matchers.or_matchers or node.at:
            raise NotCovered(f"`{node}` is a selector that this check does not know")
        matchers += [(NAME, "MatchOp.Equal", node.name)] if node.name else []
        return {labels: points[bisect_left(self.times[labels], start):
                               bisect_right(self.times[labels], end)]
                for labels, points in self.series.items()
                if all(matches(dict(labels).get(name, ""), *rest) for name, *rest in matchers)}

    def VectorSelector(self, node, t):
        t -= offset(node)
        return {labels: points[-1][1] for labels, points
                in self.samples(node, t - LOOKBACK, t).items()
                if points and points[-1][1] is not STALE}

    def MatrixSelector(self, node, t):
        t -= offset(node.vector_selector)
        samples = self.samples(node.vector_selector, t - node.range.total_seconds(), t)
        fresh = {labels: [point for point in points if point[1] is not STALE]
                 for labels, points in samples.items()}
        return {labels: points for labels, points in fresh.items() if points}

    def SubqueryExpr(self, node, t):
        step, ranges = node.step.total_seconds() if node.step else self.step, {}
        t -= offset(node)
        for n in range(math.ceil((t - node.range.total_seconds()) / step), int(t // step) + 1):
            if (node, n) not in self.subqueries:
                self.subqueries[node, n] = as_vector(self(node.expr, n * step))
            for labels, x in self.subqueries[node, n].items():
                ranges.setdefault(labels, []).append((n * step, x))
        return ranges

    def AggregateExpr(self, node, t):
        op, groups, vector = str(node.op), {}, self(node.expr, t)
        for labels, x in vector.items():
            groups.setdefault(group_of(labels, node.modifier), []).append(x)
        if op in RANKED:
            return ranked(vector, int(self(node.param, t)), RANKED[op], node.modifier)
        reduce = partial(quantile, self(node.param, t)) if op == "quantile" else REDUCE.get(op)
        if reduce is None:
            raise NotCovered(f"{op}() is PromQL that this check does not know")
        return {labels: float(reduce(values)) for labels, values in groups.items()}

    def Call(self, node, t):
        name, args = node.func.name, node.args
        if name == "time":
            return float(t)
        values = [arg.val if type(arg).__name__ == "StringLiteral" else self(arg, t)
                  for arg in args]
        if name in ("absent", "absent_over_time"):
            return {} if values[0] else {labels_of_absent(args[0]): 1.0}
        if name == "label_replace":
            return replace_label(*values)
        if name in ("sort", "sort_desc"):
            return values[0]
        if name == "clamp" and values[2] < values[1]:
            return {}
        if name == "vector":
            return as_vector(values[0])
        if name == "scalar":
            return [*values[0].values()][0] if len(values[0]) == 1 else math.nan
        if name in NUMBERS:
            return without_name({k: NUMBERS[name](x, *values[1:]) for k, x in values[0].items()})
        kind = name.removesuffix("_over_time")
        if kind == "quantile" or kind != name and kind in REDUCE:
            reduce = partial(quantile, values[0]) if kind == "quantile" else REDUCE[kind]

            def value_of(points):
                return reduce([x for _, x in points])
        elif name in ("rate", "increase", "delta", "irate", "idelta"):
            end = t - offset(getattr(args[0], "vector_selector", args[0]))
            value_of = partial(change, name, end, args[0].range.total_seconds())
        elif name in ("changes", "resets"):
            value_of = partial(steps, name)
        elif name in ("deriv", "predict_linear"):
            ahead = values[1] if name == "predict_linear" else None
            value_of, values = partial(line, t, ahead), values[:1]
        else:
            raise NotCovered(f"{name}() is PromQL that this check does not know")
        vector = {labels: value_of(points) for labels, points in values[-1].items()}
        vector = {labels: x for labels, x in vector.items() if x is not None}
        return vector if name == "last_over_time" else without_name(vector)

    def BinaryExpr(self, node, t):
        left, right, op = self(node.lhs, t), self(node.rhs, t), str(node.op)
        if op in ("and", "or", "unless"):
            return set_operation(op, left, right, node.modifier)
        if (compute := (ARITHMETIC | COMPARE).get(op)) is None:
            raise NotCovered(f"`{op}` is PromQL that this check does not know")
        if isinstance(left, float) and isinstance(right, float):
            return float(compute(left, right))
        if isinstance(right, float):
            pairs = [(labels, x, right) for labels, x in left.items()]
        elif isinstance(left, float):
            pairs = [(labels, left, x) for labels, x in right.items()]
        else:
            pairs = match_pairs(left, right, node.modifier)
        if op in ARITHMETIC or node.modifier and node.modifier.return_bool:
            return without_name({labels: compute(a, b) for labels, a, b in pairs})
        return {labels: b if isinstance(left, float) else a for labels, a, b in pairs
                if compute(a, b)}


def ranked(vector, k, largest, modifier):
    """Return the k largest or smallest of each group, with all their labels."""
    groups = {}
    for labels, x in vector.items():
        groups.setdefault(group_of(labels, modifier), []).append((labels, x))
    sign = -1 if largest else 1
    return dict(pair for pairs in groups.values() for pair in sorted(
        pairs, key=lambda pair: (math.isnan(pair[1]), sign * pair[1]))[:max(0, k)])


def labels_of_absent(node):
    """Return the labels that a selector asks for by `=`: the labels that absent() gives."""
    selector = getattr(node, "vector_selector", node)
    equal = [(m.name, m.value) for m in getattr(getattr(selector, "matchers", None), "matchers", ())
             if str(m.op) == "MatchOp.Equal" and m.name != NAME and m.value]
    names = [name for name, _ in equal]
    return frozenset(pair for pair in equal if names.count(pair[0]) == 1)


def replace_label(vector, target, replacement, source, pattern):
    """Do PromQL's label_replace().

    If `pattern` matches the whole source label, the target label becomes `replacement`, with $1
    filled in.
    Raises: ValueError if two series get the same labels.
    """
    replacement, result = re.sub(r"\$\{?(\w+)\}?", r"\\g<\1>", replacement), {}
    for labels, x in vector.items():
        if match := re.fullmatch(pattern, dict(labels).get(source, "")):
            text = match.expand(replacement)
            labels = without(labels, target) | ({(target, text)} if text else set())
        if labels in result:
            raise ValueError("vector cannot contain metrics with the same labelset")
        result[labels] = x
    return result


def steps(name, points):
    """Count the values that differ from the previous one, for changes(); or are less, for resets().
    """
    pairs = [(a, b) for (_, a), (_, b) in zip(points, points[1:])]
    if name == "resets":
        return float(sum(b < a for a, b in pairs))
    return float(sum(a != b and not (math.isnan(a) and math.isnan(b)) for a, b in pairs))


def line(t, ahead, points):
    """Fit a line by least squares: return its slope, or its value `ahead` seconds from now.

    For deriv() and predict_linear(). None for fewer than two points.
    """
    if len(points) < 2:
        return None
    xs, ys = [time - t for time, _ in points], [y for _, y in points]
    if all(y == ys[0] for y in ys):
        return 0.0 if ahead is None else ys[0]
    slope, intercept = statistics.linear_regression(xs, ys)
    return slope if ahead is None else intercept + slope * ahead


def offset(node):
    delay = getattr(node, "offset", None)
    return delay.total_seconds() if delay else 0


def matches(text, op, value):
    is_so = re.fullmatch(value, text) is not None if "Re" in op else text == value
    return is_so != ("Not" in op)


def as_vector(value):
    return {frozenset(): value} if isinstance(value, float) else value


def without(labels, *names):
    return frozenset(pair for pair in labels if pair[0] not in names)


def only(labels, *names):
    return frozenset(pair for pair in labels if pair[0] in names)


def without_name(values):
    """Drop the metric's name, because the values have a new meaning; convert them to float."""
    return {without(labels, NAME): float(x) for labels, x in values.items()}


def group_of(labels, modifier, is_on="By"):
    """Return the labels that a modifier keeps.

    `by (...)` and `on (...)` name the labels to keep; `without (...)` and `ignoring (...)` name
    the labels to drop.
    """
    if modifier is None:
        return frozenset() if is_on == "By" else without(labels, NAME)
    listed = str(modifier.type).endswith(is_on)
    return only(labels, *modifier.labels) if listed else without(labels, NAME, *modifier.labels)


def key_of(labels, modifier):
    return group_of(labels, modifier and modifier.matching, "Include")


def set_operation(op, left, right, modifier):
    left_keys, right_keys = ({key_of(k, modifier) for k in side} for side in (left, right))
    if op == "or":
        return left | {k: x for k, x in right.items() if key_of(k, modifier) not in left_keys}
    return {k: x for k, x in left.items() if (key_of(k, modifier) in right_keys) == (op == "and")}


def match_pairs(left, right, modifier):
    """Return [(labels of the result, left value, right value)].

    Raises: ValueError in Prometheus' own words.
    """
    card = str(modifier.card) if modifier else ""
    is_right = "OneToMany" in card
    many_side, one_side = (right, left) if is_right else (left, right)
    partners, pairs = {}, {}
    for labels, y in one_side.items():
        if partners.setdefault(key_of(labels, modifier), (labels, y)) != (labels, y):
            raise ValueError("found duplicate series for the match group; many-to-many matching "
                             "not allowed: matching labels must be unique on one side")
    for labels, x in many_side.items():
        if (key := key_of(labels, modifier)) not in partners:
            continue
        partner, y = partners[key]
        if "Many" in card:
            extra = modifier.group_labels or ()
            labels = without(labels, *extra) | only(partner, *extra)
        elif modifier and modifier.matching:
            labels = key
        if labels in pairs:
            raise ValueError("multiple matches for labels: many-to-one matching must be explicit "
                             "(group_left/group_right)")
        pairs[labels] = (y, x) if is_right else (x, y)
    return [(labels, *values) for labels, values in pairs.items()]


def change(name, end, length, points):
    """Compute rate, increase or delta; or irate or idelta, from only the last two samples.

    The change from the first sample to the last is extrapolated to the whole range if they are near
    its ends. A counter that falls has restarted at 0. None for fewer than two samples.
    """
    if len(points) < 2:
        return None
    is_counter = name in ("rate", "increase", "irate")
    points = points[-2:] if name[0] == "i" and name != "increase" else points
    (first, low), (last, high) = points[0], points[-1]
    total = high - low + is_counter * sum(a for (_, a), (_, b) in zip(points, points[1:]) if b < a)
    if name in ("irate", "idelta"):
        return total / (last - first) if name == "irate" else total
    sampled, gaps = last - first, [first - (end - length), end - last]
    if is_counter and total > 0 and low >= 0:
        gaps[0] = min(gaps[0], sampled * low / total)  # it was never below 0
    mean = sampled / (len(points) - 1)
    stretched = sampled + sum(gap if gap < 1.1 * mean else mean / 2 for gap in gaps)
    return total * stretched / sampled / (length if name == "rate" else 1)
