"""The alerts of a rule that fire, and when, as a Prometheus server decides at each evaluation."""

import re

from ranklab.cluster.promql import NAME, Evaluator, as_vector, parse, without

UNITS = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "y": 31536000}


def seconds(duration):
    """Return the seconds of a duration: "1m30s" -> 90.0; error ValueError."""
    if not re.fullmatch(r"0|(\d+(ms|[smhdwy]))+", str(duration)):
        raise ValueError(f"not a valid duration string: {duration!r}")
    return sum(float(count) * UNITS[unit]
               for count, unit in re.findall(r"(\d+)(ms|[smhdwy])", str(duration)))


def alerts(rule, series, times):
    """Return [(seconds, {labels})] of the alerts of `rule` that fire at each of `times`.

    rule   {"alert", "expr", "for", "labels", "annotations"} as in a rules file
    series  see promql.Evaluator
    times  in seconds, evenly spaced
    Raises: ValueError in Prometheus' words; NotCovered.
    """
    times = [*times]
    node, step = parse(rule["expr"]), times[1] - times[0]
    evaluate, since, last_active, firing = Evaluator(series, step), {}, {}, []
    hold, keep = (seconds(rule.get(key, 0)) for key in ("for", "keep_firing_for"))
    for t in times:
        active = [_alert_labels(rule.get("labels") or {}, labels, x)
                  for labels, x in as_vector(evaluate(node, t)).items()]
        if len({*active}) < len(active):
            raise ValueError("vector contains metrics with the same labelset after applying alert "
                             "labels")
        lasting = {labels for labels, begun in since.items()
                   if begun + hold <= last_active[labels] and t - step - last_active[labels] < keep}
        last_active |= dict.fromkeys(active, t)
        since = {labels: since.get(labels, t) for labels in lasting.union(active)}
        firing += [(t, dict(labels)) for labels, begun in since.items() if t - begun >= hold]
    return firing


def _alert_labels(rule_labels, labels, value):
    """The labels of an alert: the rule's labels win, and $labels in them is filled in."""
    series_labels = dict(without(labels, NAME))
    return frozenset((series_labels | {name: re.sub(
        r"\{\{\s*(?:\$labels\.(\w+)|\$value)\s*\}\}",
        lambda match: series_labels.get(match[1], "") if match[1] else f"{value:g}", str(text))
        for name, text in rule_labels.items()}).items())
