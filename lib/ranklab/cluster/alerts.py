"""Which alerts of a rule fire, and when, as a Prometheus server decides at each evaluation."""

import re

from ranklab.cluster.promql import NAME, Evaluator, as_vector, parse, without

UNITS = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "y": 31536000}


def seconds(duration):
    """"1m30s" -> 90.0; error ValueError"""
    if not re.fullmatch(r"0|(\d+(ms|[smhdwy]))+", str(duration)):
        raise ValueError(f"not a valid duration string: {duration!r}")
    return sum(float(count) * UNITS[unit]
               for count, unit in re.findall(r"(\d+)(ms|[smhdwy])", str(duration)))


def alerts(rule, series, times):
    """[(seconds, {labels})] of the alerts of `rule` that fire at each of `times`, evenly spaced.

    rule   {"alert", "expr", "for", "labels", "annotations"} as in a rules file
    series  see promql.Evaluator
    error  ValueError as Prometheus says it; NotCovered
    """
    times = [*times]
    node, step = parse(rule["expr"]), times[1] - times[0]
    evaluate, since, seen, firing = Evaluator(series, step), {}, {}, []
    hold, keep = (seconds(rule.get(key, 0)) for key in ("for", "keep_firing_for"))
    for t in times:
        active = [expanded(rule.get("labels") or {}, labels, x)
                  for labels, x in as_vector(evaluate(node, t)).items()]
        if len({*active}) < len(active):
            raise ValueError("vector contains metrics with the same labelset after applying alert "
                             "labels")
        kept = {labels for labels, begun in since.items() if begun + hold <= seen[labels]
                and t - step - seen[labels] < keep}
        seen |= dict.fromkeys(active, t)
        since = {labels: since.get(labels, t) for labels in kept.union(active)}
        firing += [(t, dict(labels)) for labels, begun in since.items() if t - begun >= hold]
    return firing


def expanded(own, labels, value):
    """The labels of an alert: those of the rule win, and $labels in them is filled in."""
    given = dict(without(labels, NAME))
    return frozenset((given | {name: re.sub(
        r"\{\{\s*(?:\$labels\.(\w+)|\$value)\s*\}\}",
        lambda found: given.get(found[1], "") if found[1] else f"{value:g}", str(text))
        for name, text in own.items()}).items())
