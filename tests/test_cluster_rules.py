"""Alert rules: their evaluator beside promtool, and what the real servers make of them."""

import contextlib
import functools
import json
import math
import re
import runpy
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT

from ranklab import launch
from ranklab.checks.cluster import rules as checks_of
from ranklab.cluster import stories as checks
from ranklab.cluster.alarm import rule_alarm, score, sick_rank_alarm
from ranklab.cluster.alerts import alerts, seconds
from ranklab.cluster.curves import read_scalars, read_trace, traced_steps, waits_in_traces
from ranklab.cluster.curves import write_scalars
from ranklab.cluster.exporter import DCGM, METRICS, Exporter
from ranklab.cluster.monitor import Monitor, missing
from ranklab.cluster.promql import STALE, Evaluator, NotCovered, as_vector, parse
from ranklab.cluster.recordings import HEALTHY, recordings
from ranklab.cluster.rules import mfu_alert_rule, silent_host_rule, straggler_rule
from ranklab.projects.cluster.watched import watched_run
from ranklab.trainer import History

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="needs prometheus: "
                                    "apt install prometheus")
EXPRESSIONS = """
train_step_seconds
train_step_seconds{rank=~"1|2", run!="b"} offset 1m
-train_step_seconds > -2 and on (run, rank) train_tokens_total
1.5 < train_step_seconds
train_step_seconds > bool 1.2
train_step_seconds unless on (rank) train_tokens_total{rank="0"}
train_tokens_total{rank="0"} or train_step_seconds
train_step_seconds / on (run) group_left quantile by (run) (0.5, train_step_seconds)
quantile by (run) (0.5, train_step_seconds) * on (run) group_right train_step_seconds
train_step_seconds / on (run, rank) train_tokens_total
train_step_seconds / ignoring (instance) train_tokens_total
train_step_seconds * on (run, rank) group_left (instance) train_tokens_total
rate(train_tokens_total[1m])
rate(train_tokens_total[5m] offset 2m)
increase(train_tokens_total[4m])
irate(train_tokens_total[2m])
delta(train_step_seconds[3m])
idelta(train_step_seconds[3m])
changes(train_tokens_total[5m]) + resets(train_tokens_total[10m])
avg_over_time(train_step_seconds[1m])
quantile_over_time(0.9, train_step_seconds[5m])
stddev_over_time(train_step_seconds[5m]) / avg_over_time(train_step_seconds[5m])
max_over_time(train_step_seconds[2m]) - min_over_time(train_step_seconds[2m])
count_over_time(train_step_seconds[2m]) + sum_over_time(train_step_seconds[2m])
last_over_time(train_step_seconds[1m])
max_over_time(rate(train_tokens_total[1m])[5m:30s])
avg_over_time((train_step_seconds > bool 1.2)[4m:])
rate(sum by (run) (train_tokens_total)[5m:15s])
sum(train_step_seconds) + count(train_step_seconds) - scalar(max(train_step_seconds))
avg without (rank, instance) (train_step_seconds)
stddev by (run) (train_step_seconds)
topk(2, train_step_seconds)
bottomk by (run) (1, train_step_seconds)
absent(train_nothing) or vector(3)
clamp(train_step_seconds, 1, 1.1) + clamp_max(train_step_seconds, 1)
abs(ceil(train_step_seconds) - round(train_step_seconds, 0.5)) ^ 2
time() - 60 * 2
"""


@functools.cache
def some_series():
    """Of two runs, with a restart, failed scrapes and a rank that is gone."""
    series = checks.stepped((2, 3, 99, 1.5), (1, 5, 99, 0), ranks=3, size=41, fails=(2,))
    checks.stepped(ranks=2, run="b", step=5.0, size=41, series=series)
    return checks.trained((0, [(2, 0.0), (6, 0.4)]), (8, [(10, 0.4)]), ranks=2, series=series)


def promtool(folder, series, rules=(), tests=(), last=600):
    """What `promtool test rules` says; tests are entries of its file."""
    def of(points):
        at = dict(points)
        return " ".join("_" if t not in at else "stale" if at[t] is STALE else repr(at[t])
                        for t in range(0, last + 1, 15))
    given = [{"series": at(labels), "values": of(points)} for labels, points in series.items()]
    (folder / "rules.json").write_text(json.dumps({"groups": [
        {"name": "all", "rules": [*rules]}]}))
    (folder / "test.json").write_text(json.dumps({
        "rule_files": ["rules.json"], "evaluation_interval": "15s",
        "tests": [{"interval": "15s", "input_series": given, **dict(tests)}]}))
    done = subprocess.run(["promtool", "test", "rules", "test.json"], cwd=folder, text=True,
                          capture_output=True, timeout=60)
    return done.stdout + done.stderr


def at(labels):
    name = dict(labels).get("__name__", "")
    return name + "{%s}" % ", ".join(f'{key}="{value}"' for key, value in sorted(labels)
                                     if key != "__name__")


@needs_promtool
def test_expressions_have_promtools_values(tmp_path):
    texts, times = EXPRESSIONS.strip().splitlines(), (0, 45, 300, 420, 600)
    said = promtool(tmp_path, some_series(), tests={"promql_expr_test": [
        {"expr": text, "eval_time": f"{t}s", "exp_samples": []} for text in texts for t in times]})
    found = {(json.loads(text), seconds(time)): {
        frozenset(re.findall(r'(\w+)="(.*?)"', labels)): float(x)
        for labels, x in re.findall(r"{(.*?)} ([-+.\dEInf]+)", got)}
        for text, time, got in re.findall(r"expr: (.*), time: (\w+),\n.*\n\s+got: (.*)", said)}
    assert len(found) > 100, said[:2000]
    evaluate = Evaluator(some_series())
    for text in texts:
        for t in times:
            values, right = as_vector(evaluate(parse(text), t)), found.get((text, t), {})
            values = {labels or frozenset(): x for labels, x in values.items()}
            assert values.keys() == right.keys() and all(
                math.isclose(x, right[labels], rel_tol=1e-9, abs_tol=1e-12)
                for labels, x in values.items()), (text, t, values, right)


@needs_promtool
def test_alerts_are_promtools_for_every_kept_answer(tmp_path):
    """At four times each, on two runs that slow down while scrapes fail."""
    kept, wrong, right = {}, answers("wrong_answers"), answers("right_answers")
    for name, rule_of in {"mfu_alert_rule": mfu_alert_rule, "straggler_rule": straggler_rule,
                          **wrong, **right}.items():
        values = (0.3, 10) if name.startswith("mfu") else (1.2, 5)
        kept[name] = {**rule_of(*values), "alert": name, "annotations": {}}
    series = checks.trained((0, [(4, 0.0), (15, 0.4), (40, 0.2)]), fails=True)
    checks.trained((0, [(20, 0.4)]), (22, [(40, 0.35)]), run="b", series=series)
    checks.stepped((5, 10, 99, 1.5), (3, 8, 8.5, 9.0), fails=(5,), series=series)
    wanted = []
    for name, rule in kept.items():
        try:
            fired = alerts(rule, series, range(0, 2401, 15))
        except ValueError as error:  # promtool says so, too, and goes on with the next
            assert "multiple matches" in str(error)
            continue
        for t in (300, 1215, 1800, 2400):
            wanted.append({"eval_time": f"{t}s", "alertname": name, "exp_alerts": [
                {"exp_labels": labels} for at, labels in fired if at == t]})
    rules = [kept[name] for name in dict.fromkeys(each["alertname"] for each in wanted)]
    assert sum(len(each["exp_alerts"]) for each in wanted) > 20 and len(rules) > 15
    said = promtool(tmp_path, series, rules, {"alert_rule_test": wanted}, last=2400)
    assert "SUCCESS" in said, said[:3000]


def answers(folder):
    """{name: rule function} in tests/<folder>/cluster/rules.py"""
    path = ROOT / "tests" / folder / "cluster" / "rules.py"
    module = runpy.run_path(str(path))
    found = {each.test_id: each for each in module.get("WRONG", ())}
    found |= {name: each for name, each in module.items() if "__" in name.strip("_")}
    return {name: each for name, each in found.items() if "_rule__" in name}


@pytest.mark.parametrize("text, says", [("histogram_quantile(0.9, x)", "histogram_quantile"),
                                        ("count_values('a', x)", "count_values"),
                                        ("x @ 5", "x{} @ 5"), ("'text'", "text")])
def test_what_is_not_covered_says_so(text, says):
    with pytest.raises(NotCovered, match=says):
        Evaluator(some_series())(parse(text), 0)
    rule = {"alert": "A", "expr": "histogram_quantile(0.9, x)"}
    said = [*checks_of.check_mfu_alert_rule(lambda least, minutes: rule)]
    assert len(said) == 1 and said[0].startswith("NOT JUDGED: histogram_quantile() is PromQL")


# --- the real servers ----------------------------------------------------------------------------

needs_servers = pytest.mark.skipif(bool(missing()), reason=missing())


@needs_servers
@pytest.mark.timeout(180)
def test_an_alert_about_a_slow_rank_reaches_the_webhook(tmp_path):
    """Four real ranks; rank 2 waits for its data. All is gone afterwards."""
    found = watched_run(tmp_path, straggler_rule(1.5, 5) | {"for": "2s"})
    labels, notes = found["alert"]["labels"], found["alert"]["annotations"]
    assert (labels["run"], labels["rank"]) == ("gpt", "2")
    assert re.search(r"run gpt: rank 2 takes [\d.]+ times as long", notes["summary"])
    seconds = found["step_seconds"]
    assert max(seconds, key=seconds.get) == 2 and len(seconds) == 4 and found["tokens"] > 0
    assert running(tmp_path) == []


@needs_servers
def test_nothing_is_left_when_the_monitors_process_is_killed(tmp_path):
    code = ("import sys, time\nfrom ranklab.cluster.monitor import Monitor\n"
            "monitor = Monitor(sys.argv[1], []).__enter__()\n"
            "print('up', flush=True)\ntime.sleep(60)")
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n" and len(running(tmp_path)) == 3
    process.kill()
    process.wait()
    end = time.monotonic() + 10
    while running(tmp_path) and time.monotonic() < end:
        time.sleep(0.05)
    assert running(tmp_path) == []


def running(folder):
    """The processes of a Monitor in `folder` that live; not those that are asked about it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_text().split("\0")
            if any(str(folder) in word for word in words[1:]) and "-c" not in words:
                found.append(words[0])
    return found


@needs_servers
def test_what_does_not_start_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="(?s)prometheus did not begin.*error loading config"):
        Monitor(tmp_path, [{"alert": "A", "expr": "rate("}]).__enter__()
    assert running(tmp_path) == []
    with Monitor(tmp_path, []) as monitor, pytest.raises(TimeoutError, match="no alert A in 0.1 s"):
        monitor.wait("A", 0.1)


def test_the_sentence_where_prometheus_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing() == "needs prometheus: apt install prometheus prometheus-alertmanager"
    with pytest.raises(RuntimeError, match="needs prometheus"):
        Monitor(tmp_path, []).__enter__()


# --- files ---------------------------------------------------------------------------------------

FILES = ROOT / "labs" / "jobs" / "monitoring"


def test_the_rules_file_is_what_the_functions_return():
    groups = yaml.safe_load((FILES / "rules.yml").read_text())["groups"]
    assert groups[0]["rules"] == [mfu_alert_rule(0.3, 10), straggler_rule(1.2, 5),
                                  silent_host_rule(1)]


@needs_promtool
def test_prometheus_takes_the_files(tmp_path):
    done = subprocess.run(["promtool", "check", "config", FILES / "prometheus.yml"], text=True,
                          capture_output=True, timeout=60)
    assert done.returncode == 0 and "3 rules found" in done.stdout, done.stdout + done.stderr


def test_each_panel_of_the_dashboard_shows_metrics_that_exist():
    """Linted, never opened: Grafana is not in Debian."""
    board = json.loads((FILES / "dashboard.json").read_text())
    panels = [each for each in board["panels"] if each["type"] != "row"]
    known, seen = {*METRICS, *DCGM, "ALERTS"}, set()
    assert len({each["id"] for each in board["panels"]}) == len(board["panels"]) > 10
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24 and panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            text = target["expr"].replace("$run", ".*").replace("$__rate_interval", "5m")
            Evaluator({})(parse(text), 0)
            seen |= {*re.findall(r"\b(?:train|DCGM)_\w+|ALERTS", text)}
    assert seen <= known and {"train_tokens_total", "train_step_seconds"} <= seen
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len({*places}) == len(places)


def test_scalars_come_back_from_tensorboards_files(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    history = History([1, 50], [3.0, 2.5], [0.0, 1000.0], [0.5, 0.25], {50: 2.75})
    write_scalars(tmp_path, history)
    assert read_scalars(tmp_path) == {
        "train/loss": [(1, 3.0), (50, 2.5)], "train/speed": [(1, 0.0), (50, 1000.0)],
        "train/waits": [(1, 0.5), (50, 0.25)], "held_out/loss": [(50, 2.75)]}


def test_the_traces_name_the_rank_that_lets_others_wait(tmp_path):
    paths = launch(traced_steps, tmp_path, 1, ranks=3)
    info, events = read_trace(paths[2])
    assert (info["rank"], info["world_size"], info["backend"]) == (2, 3, "gloo")
    assert {"step 0", "aten::mm"} <= {each["name"] for each in events}
    waits = waits_in_traces(paths)
    assert list(waits) == [0, 1, 2] and min(waits, key=waits.get) == 1


def test_an_exporter_serves_and_takes_its_file_away(tmp_path):
    exporter = Exporter({"run": "a", "rank": 3}, targets=tmp_path)
    exporter.add(train_tokens_total=512)
    exporter.add(train_tokens_total=512)
    target, = json.loads(next(tmp_path.glob("*.json")).read_text())
    with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert "# TYPE train_tokens_total counter\n" in text
    assert 'train_tokens_total{run="a",rank="3"} 1024.0\n' in text
    exporter.close()
    assert not [*tmp_path.iterdir()]


# --- recordings ----------------------------------------------------------------------------------

def test_recordings_are_those_of_their_seed_and_the_library_beats_the_rule():
    runs, again = recordings([3]), recordings([3])
    for one, other in zip(runs, again):
        assert (one.kind, one.sick, one.onset) == (other.kind, other.sick, other.onset)
        for name, each in one.metrics.items():
            assert np.array_equal(each, other.metrics[name], equal_nan=True)
    library, rule = score(sick_rank_alarm, runs), score(rule_alarm, runs)
    assert library.mean_seconds < 0.4 * rule.mean_seconds and library.value > rule.value + 0.2
    nobody = score(lambda metrics: None, runs)
    assert nobody.value == len(HEALTHY) / len(runs) and not nobody.false
