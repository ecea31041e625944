"""A Poller does the work of Monitor without Prometheus: this library evaluates the rules."""

import contextlib
import json
import re
import threading
import time
import urllib.request

from ranklab.cluster.alerts import alerts
from ranklab.cluster.monitor import Monitor, missing
from ranklab.cluster.promql import NAME, STALE, Evaluator, as_vector, parse, without

SAMPLE = re.compile(r"(\w+)\{(.*)\} (\S+)")  # as our Exporter writes it
TEMPLATE = re.compile(r"\{\{\s*\$(?:labels\.(\w+)|value)[^}]*\}\}")


class Poller(Monitor):
    """Scrape the targets and evaluate `rules` in this process, until the block ends.

    Each target has a file in `targets`. An alert that fires is written into the inbox, once. The
    Poller opens no port.
    """

    def __enter__(self):
        self.targets.mkdir(parents=True, exist_ok=True)
        self.inbox.touch()
        self.series, self.polls, self.fired, self.over = {}, 0, set(), threading.Event()
        self.thread = threading.Thread(target=self.poll, daemon=True)
        self.thread.start()
        return self

    def poll(self):
        while not self.over.wait(self.scrape):
            self.polls += 1  # a poll's number x scrape is its time
            fresh = self.scrape_targets()
            for labels in self.series.keys() | fresh.keys():
                points = self.series.setdefault(labels, [])
                points.append((self.polls * self.scrape, fresh.get(labels, STALE)))
            for rule in self.rules:
                self.judge(rule)

    def scrape_targets(self):
        """Return {labels: value} from all targets that answer."""
        values = {}
        for path in self.targets.glob("*.json"):
            with contextlib.suppress(OSError, ValueError):  # it has just ended
                group = json.loads(path.read_text())[0]
                target, = group["targets"]
                with urllib.request.urlopen(f"http://{target}/metrics", timeout=2) as answer:
                    for name, labels, value in SAMPLE.findall(answer.read().decode()):
                        pairs = re.findall(r'(\w+)="([^"]*)"', labels)
                        key = frozenset({(NAME, name), ("instance", target), *pairs,
                                         *group["labels"].items()})
                        values[key] = float(value)
        return values

    def judge(self, rule):
        """Write alerts of `rule` that fire for the first time into the inbox."""
        times = range(0, self.polls * self.scrape + 1, self.scrape)
        for at, labels in alerts(rule, self.series, times):
            key = rule["alert"], frozenset(labels.items())
            if at != times[-1] or key in self.fired:
                continue
            self.fired.add(key)
            value = next((x for row, x in self.query(rule["expr"])
                          if row.items() <= labels.items()), float("nan"))
            words = {name: TEMPLATE.sub(lambda match: labels.get(match[1], "") if match[1]
                                        else f"{value:.4g}", text)
                     for name, text in rule.get("annotations", {}).items()}
            with open(self.inbox, "a") as inbox:
                inbox.write(json.dumps({
                    "time": time.time(), "status": "firing", "annotations": words,
                    "labels": {**labels, "alertname": rule["alert"]}}) + "\n")

    def query(self, expression):
        now = self.polls * self.scrape
        vector = as_vector(Evaluator(dict(self.series), self.scrape)(parse(expression), now))
        return [(dict(without(labels, NAME)), value) for labels, value in vector.items()]

    def close(self):
        self.over.set()
        self.thread.join(10)


def watcher():
    """Return the class to watch with: Monitor if Prometheus is installed, otherwise Poller."""
    return Poller if missing() else Monitor
