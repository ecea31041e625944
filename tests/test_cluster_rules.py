"""Alert rules: their evaluator beside promtool, what the real servers make of them, and files."""

import json
import math
import re
import shutil
import subprocess
import sys
import time

import psutil
import pytest
import yaml
from conftest import ROOT

from ranklab import launch
from ranklab.checks.cluster.rules import STRAGGLER
from ranklab.checks.exercise import Mistake
from ranklab.cluster import monitor, promql
from ranklab.cluster.alarm import rule_alarm, score, sick_rank_alarm
from ranklab.cluster.alerts import alerts, seconds
from ranklab.cluster.curves import (
    read_scalars, read_trace, traced_steps, waits_in_traces, write_scalars,
)
from ranklab.cluster.exporter import DCGM, METRICS
from ranklab.cluster.poller import Poller
from ranklab.cluster.promql import Evaluator, NotCovered, as_vector, parse
from ranklab.cluster.promtool import promtool
from ranklab.cluster.recordings import CLOCK, ECC, TEMP, recordings
from ranklab.cluster.rules import mfu_alert_rule, silent_host_rule, straggler_rule
from ranklab.cluster.stories import stepped, trained
from ranklab.projects.cluster import watched
from ranklab.projects.cluster.watched import watched_run
from ranklab.trainer import History

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="needs prometheus: "
                                    "apt install prometheus")
needs_servers = pytest.mark.skipif(bool(monitor.missing()), reason=monitor.missing())
needs_parser = pytest.mark.skipif(bool(promql.missing()), reason=promql.missing())
FILES = ROOT / "labs" / "jobs" / "monitoring"
EXPRESSIONS = """
train_step_seconds{rank=~"1|2", run!="b"} offset 1m
-train_step_seconds > -2 and on (run, rank) train_tokens_total
1.5 < train_step_seconds > bool 1.2
train_step_seconds unless on (rank) train_tokens_total{rank="0"} or train_step_seconds
train_step_seconds / on (run) group_left quantile by (run) (0.5, train_step_seconds)
quantile by (run) (0.5, train_step_seconds) * on (run) group_right train_step_seconds
train_step_seconds / ignoring (instance) train_tokens_total
rate(train_tokens_total[1m] offset 2m) + increase(train_tokens_total[4m])
irate(train_tokens_total[2m]) - idelta(train_step_seconds[3m])
delta(train_step_seconds[3m])
quantile_over_time(0.9, train_step_seconds[5m]) / stddev_over_time(train_step_seconds[5m])
max_over_time(train_step_seconds[2m]) - min_over_time(train_step_seconds[2m])
count_over_time(train_step_seconds[2m]) + sum_over_time(train_step_seconds[2m])
max_over_time(rate(train_tokens_total[1m])[5m:30s])
avg_over_time((train_step_seconds > bool 1.2)[4m:])
rate(sum by (run) (train_tokens_total)[5m:15s])
sum(train_step_seconds) + count(train_step_seconds) - scalar(max(train_step_seconds))
avg without (rank, instance) (train_step_seconds) - stddev by (run) (train_step_seconds)
absent(train_nothing) or vector(3)
abs(clamp_max(train_step_seconds, 1)) - time()
topk(1, sum by (run) (train_step_seconds)) or bottomk by (run) (3, train_tokens_total)
count(group by (run, rank) (train_step_seconds)) + stdvar by (run) (train_step_seconds)
changes(train_step_seconds[3m]) + resets(train_tokens_total[4m])
deriv(train_step_seconds[3m]) > 0 or predict_linear(train_tokens_total[2m], 600)
round(train_step_seconds, 0.25) + ceil(train_step_seconds) - floor(train_step_seconds)
train_tokens_total % 7 ^ 2 + clamp(train_step_seconds, 0.5, 1.2) * sgn(-train_step_seconds)
label_replace(train_step_seconds, "node", "n$1-${1}", "rank", "([12])")
label_replace(train_step_seconds, "job", "", "rank", ".*")
absent(train_nothing{run="b", rank=~".*", rank!="1"}) or absent_over_time(train_no{run="a"}[5m])
present_over_time(train_step_seconds[1m]) or sort(train_step_seconds)
"""


@needs_promtool
@needs_parser
def test_expressions_have_promtools_values():
    """On two runs, with a restart, failed scrapes and a rank that is gone."""
    series = stepped((2, 3, 99, 1.5), (1, 5, 99, 0), ranks=3, size=41, fails=(2,))
    stepped(ranks=2, run="b", step=5.0, size=41, series=series)
    trained((0, [(2, 0.0), (6, 0.4)]), (8, [(10, 0.4)]), ranks=2, series=series)
    texts, times = EXPRESSIONS.strip().splitlines(), (0, 45, 300, 420, 600)
    said = promtool(series, tests={"promql_expr_test": [
        {"expr": text, "eval_time": f"{t}s", "exp_samples": []} for text in texts for t in times]})
    found = {(json.loads(text), seconds(at)): {
        frozenset(re.findall(r'(\w+)="(.*?)"', labels)): float(x)
        for labels, x in re.findall(r"{(.*?)} ([-+.\dEInf]+)", got)}
        for text, at, got in re.findall(r"expr: (.*), time: (\w+),\n.*\n\s+got: (.*)", said)}
    assert len(found) > 60, said[:2000]
    evaluate = Evaluator(series)
    for text in texts:
        for t in times:
            values, right = as_vector(evaluate(parse(text), t)), found.get((text, t), {})
            assert values.keys() == right.keys() and all(
                math.isclose(x, right[labels], rel_tol=1e-9, abs_tol=1e-12)
                for labels, x in values.items()), (text, t, values, right)


@needs_promtool
@needs_parser
def test_alerts_are_promtools():
    """Each minute, on runs that slow down while scrapes fail."""
    series = trained((0, [(4, 0.0), (15, 0.4), (32, 0.2), (40, 0.5)]), fails=True)
    stepped((5, 10, 30, 1.5), (3, 8, 8.5, 9.0), fails=(5,), series=series)
    rules = [mfu_alert_rule(0.3, 10),
             straggler_rule(1.2, 5) | {"labels": {"who": "{{ $labels.rank }}"}},
             straggler_rule(1.2, 5) | {"alert": "Kept", "keep_firing_for": "150s", "for": "90s"}]
    wanted = []
    for rule in rules:
        rule.pop("annotations")
        fired = alerts(rule, series, range(0, 2401, 15))
        wanted += [{"eval_time": f"{t}s", "alertname": rule["alert"], "exp_alerts": [
            {"exp_labels": labels} for at, labels in fired if at == t]}
            for t in range(0, 2401, 60)]
    assert {each["alertname"] for each in wanted if each["exp_alerts"]} == {
        "LowMFU", "StragglerRank", "Kept"}
    said = promtool(series, rules, {"alert_rule_test": wanted}, last=2400)
    assert "SUCCESS" in said, said[:3000]


@needs_parser
@pytest.mark.parametrize("text", ["histogram_quantile(0.9, x)", 'count_values("n", x)', "x @ 5",
                                  "'text'"])
def test_what_is_not_covered_is_not_judged(text):
    with pytest.raises(NotCovered, match="is PromQL that this check does not know"):
        Evaluator({})(parse(text), 0)
    with pytest.raises(Mistake, match="is PromQL that this check does not know"):
        [*STRAGGLER.prove(lambda factor, minutes: {"alert": "A", "expr": text})]


def test_one_sentence_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="^needs prometheus: apt install prometheus p.*manager$"):
        monitor.Monitor(tmp_path, []).__enter__()
    monkeypatch.setattr(promql, "find_spec", lambda name: None)
    with pytest.raises(Mistake, match=r"^needs promql-parser: python -m pip install .*\[cluster\]"):
        [*STRAGGLER.prove(straggler_rule)]


@pytest.mark.parametrize("kind", [pytest.param(monitor.Monitor, marks=needs_servers),
                                  pytest.param(Poller, marks=needs_parser)])
@pytest.mark.timeout(180)
def test_an_alert_about_a_slow_rank_reaches_the_webhook(tmp_path, monkeypatch, kind):
    """Four real ranks; rank 2 waits for its data. All is gone afterwards."""
    monkeypatch.setattr(watched, "watcher", lambda: kind)
    found = watched_run(tmp_path, straggler_rule(1.5, 5) | {"for": "1s"})
    labels, notes = found["alert"]["labels"], found["alert"]["annotations"]
    assert (labels["run"], labels["rank"]) == ("gpt", "2")
    assert re.search(r"run gpt: rank 2 takes [\d.]+ times as long", notes["summary"])
    of = found["step_seconds"]
    assert max(of, key=of.get) == 2 and len(of) == 4 and found["tokens"] > 0
    assert running(tmp_path) == []


@needs_servers
def test_nothing_is_left_when_the_monitors_process_is_killed_or_cannot_start(tmp_path):
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
    with pytest.raises(RuntimeError, match="(?s)prometheus did not begin.*error loading config"):
        monitor.Monitor(tmp_path, [{"alert": "A", "expr": "rate("}]).__enter__()
    assert running(tmp_path) == []


def running(folder):
    """The processes of a Monitor in `folder` that live; not those that are asked about it."""
    lines = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
    return [line[0] for line in lines if str(folder) in " ".join(line[1:]) and "-c" not in line]


@needs_promtool
def test_the_files_are_what_prometheus_takes_and_the_functions_return():
    groups = yaml.safe_load((FILES / "rules.yml").read_text())["groups"]
    assert groups[0]["rules"] == [mfu_alert_rule(0.3, 10), straggler_rule(1.2, 5),
                                  silent_host_rule(1)]
    done = subprocess.run(["promtool", "check", "config", FILES / "prometheus.yml"], text=True,
                          capture_output=True, timeout=60)
    assert done.returncode == 0 and "3 rules found" in done.stdout, done.stdout + done.stderr


@needs_parser
def test_each_panel_of_the_dashboard_shows_metrics_that_exist():
    """Linted, never opened: Grafana is not in Debian."""
    panels = [each for each in json.loads((FILES / "dashboard.json").read_text())["panels"]
              if each["type"] != "row"]
    assert len({(each["gridPos"]["x"], each["gridPos"]["y"]) for each in panels}) == len(panels) > 8
    seen = set()
    for target in (target for panel in panels for target in panel["targets"]):
        text = target["expr"].replace("$run", ".*").replace("$__rate_interval", "5m")
        Evaluator({})(parse(text), 0)
        seen |= {*re.findall(r"\b(?:train|DCGM)_\w+", text)}
    assert {"train_tokens_total", "train_step_seconds"} <= seen <= {*METRICS, *DCGM}


def test_dcgm_exporters_list_switches_on_what_the_lab_watches():
    """The default list has some of these as comments only."""
    lines = [[part.strip() for part in line.split(",")]
             for line in (FILES / "dcgm-metrics.csv").read_text().splitlines()
             if not line.startswith("#")]
    assert {name: (kind, text) for name, kind, text in lines} == DCGM
    assert {CLOCK, ECC, TEMP} <= {*DCGM}


def test_scalars_come_back_from_tensorboards_files(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    write_scalars(tmp_path, History([1, 50], [3.0, 2.5], [0.0, 1000.0], [0.5, 0.25], {50: 2.75}))
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


def test_the_library_is_good_on_runs_that_it_has_not_seen():
    library, rule, nobody = (score(alarm, recordings([3])) for alarm in (
        sick_rank_alarm, rule_alarm, lambda metrics: None))
    assert not library.false and library.mean_seconds < 0.4 * rule.mean_seconds
    assert library.value > rule.value + 0.2 and nobody.value == 8 / 13
