"""Prometheus' own test of rules, promtool, compared with this library's evaluator."""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from ranklab.cluster.alerts import alerts
from ranklab.cluster.promql import NAME, STALE


def promtool(series, rules=(), tests=(), last=600, step=15):
    """Return the output of `promtool test rules` for `rules` on `series`.

    tests  {"promql_expr_test": [...]} or {"alert_rule_test": [...]}, as in its file
    last   seconds up to the last sample; there is one every `step` seconds
    """
    def values_text(points):
        at = dict(points)
        return " ".join("_" if t not in at else "stale" if at[t] is STALE else repr(at[t])
                        for t in range(0, last + 1, step))

    inputs = [{"series": series_text(labels), "values": values_text(points)}
              for labels, points in series.items()]
    files = {"rules.json": {"groups": [{"name": "all", "rules": [*rules]}]},
             "test.json": {
                 "rule_files": ["rules.json"], "evaluation_interval": f"{step}s",
                 "tests": [{"interval": f"{step}s", "input_series": inputs, **dict(tests)}]}}
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():  # JSON is YAML
            Path(folder, name).write_text(json.dumps(content))
        process = subprocess.run(["promtool", "test", "rules", "test.json"], cwd=folder, text=True,
                                 capture_output=True, timeout=60)
    return process.stdout + process.stderr


def series_text(labels):
    """Write a series as PromQL does: name{key="value"}."""
    pairs = ", ".join(f'{key}="{value}"' for key, value in sorted(labels) if key != NAME)
    return dict(labels).get(NAME, "") + "{%s}" % pairs


def promtool_on(rule, series, times):
    """Report whether promtool finds the same alerts of `rule` as this library's evaluator, at every
    eighth of `times`.
    """
    if not shutil.which("promtool"):
        return "needs prometheus: apt install prometheus"
    fired, times = alerts(rule, series, times), [*times]
    rule = {**rule, "annotations": {}}  # alerts() doesn't fill them in
    checks = [{"eval_time": f"{t}s", "alertname": rule["alert"], "exp_alerts": [
        {"exp_labels": labels} for at, labels in fired if at == t]} for t in times[::8]]
    output = promtool(series, [rule], {"alert_rule_test": checks}, last=times[-1])
    alive = sum(bool(check["exp_alerts"]) for check in checks)
    return (f"promtool agrees at all {len(checks)} times; the alert fires at {alive} of them"
            if "SUCCESS" in output else output)
