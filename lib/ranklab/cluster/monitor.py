"""A real Prometheus and Alertmanager with a webhook, on free ports, while they are needed."""

import contextlib
import ctypes
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

PROGRAMS = "prometheus", "prometheus-alertmanager"
READY = 30  # seconds
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def missing():
    """Return a sentence that names the missing programs; "" if nothing is missing."""
    names = [name for name in PROGRAMS if not shutil.which(name)]
    return names and f"needs prometheus: apt install {' '.join(names)}" or ""


def start(argv, **keywords):
    """Start a process that dies with the thread that started it; return its Popen."""
    return subprocess.Popen(argv, preexec_fn=functools.partial(die_with, os.getpid()), **keywords)


def die_with(parent):
    """Make Linux kill this process when `parent` dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def fetch(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read()


class Monitor:
    """Scrapes each target with a file in `targets`, and alerts by `rules`, until the block ends.

        with Monitor(folder, [straggler_rule(1.2, 5)]) as monitor:
            exporter = Exporter({"run": "a", "rank": 0}, targets=monitor.targets)
            alert = monitor.wait("StragglerRank", 60)

    folder   for its files; the caller removes it
    address  where all three listen: loopback, or an address of a network namespace
    popen    (argv, stdout=, stderr=) -> Popen: starts a process, maybe in a namespace. Killing
             the Popen must end that process
    fetch    (URL) -> the text there, if need be by a process in that namespace
    scrape   seconds between scrapes, and between evaluations of rules
    """

    def __init__(self, folder, rules, address="127.0.0.1", popen=start, fetch=fetch,
                 scrape=1):
        self.folder, self.address = Path(folder), address
        self.popen, self.fetch = popen, fetch
        self.rules, self.scrape, self.processes = [*rules], scrape, {}
        self.targets, self.inbox = self.folder / "targets", self.folder / "alerts.jsonl"

    def __enter__(self):
        if sentence := missing():
            raise RuntimeError(sentence)
        self.targets.mkdir(parents=True, exist_ok=True)
        self.inbox.touch()
        try:
            self.begin()
        except BaseException:
            self.close()
            raise
        return self

    def begin(self):
        hook = self.run("webhook", sys.executable, "-m", "ranklab.cluster.webhook", self.address,
                        str(self.inbox))
        self.write("alertmanager.yml", {
            "route": {"receiver": "hook", "group_by": ["..."], "group_wait": "0s",
                      "group_interval": "1s", "repeat_interval": "1h"},
            "receivers": [{"name": "hook", "webhook_configs": [{"url": f"http://{hook}/"}]}]})
        manager = self.run("alertmanager", "prometheus-alertmanager",
                           f"--config.file={self.folder}/alertmanager.yml",
                           f"--storage.path={self.folder}/alertmanager",
                           f"--web.listen-address={self.address}:0", "--cluster.listen-address=")
        self.write("rules.yml", {"groups": [{"name": "ranklab", "rules": self.rules}]})
        self.write("prometheus.yml", {
            "global": {"scrape_interval": f"{self.scrape}s", "scrape_timeout": f"{self.scrape}s",
                       "evaluation_interval": f"{self.scrape}s"},
            "rule_files": ["rules.yml"],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [manager]}]}]},
            "scrape_configs": [{"job_name": "train", "file_sd_configs": [
                {"files": ["targets/*.json"], "refresh_interval": "1s"}]}]})
        self.server = self.run("prometheus", "prometheus",
                               f"--config.file={self.folder}/prometheus.yml",
                               f"--storage.tsdb.path={self.folder}/prometheus",
                               f"--web.listen-address={self.address}:0",
                               ready="Server is ready")  # it listens before it reads its rules

    def write(self, name, config):
        (self.folder / name).write_text(json.dumps(config, indent=1))  # JSON is YAML

    def run(self, name, *argv, ready=""):
        """Start a program; return where it listens, "address:port", according to its log.

        Waits until the log also says `ready`.
        """
        path = self.folder / f"{name}.log"
        with open(path, "w") as log:
            process = self.processes[name] = self.popen(argv, stdout=log, stderr=log)
        end = time.monotonic() + READY
        while not (match := re.search(r"Listening on\"? address=(\S+:\d+)", path.read_text())) or (
                ready not in path.read_text()):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{name} did not begin in {READY} s: "
                                   f"{path.read_text()[-900:]}")
            time.sleep(0.02)
        return match[1]

    def received(self):
        """Return the alerts at the webhook: dicts of time, status, labels, annotations."""
        return [json.loads(line) for line in self.inbox.read_text().splitlines()]

    def wait(self, name, timeout):
        """Wait for the first alert of this name that fires; return it.

        Raises: TimeoutError after `timeout` seconds, with the alerts that came instead.
        """
        end = time.monotonic() + timeout
        while True:
            for alert in self.received():
                if alert["labels"]["alertname"] == name and alert["status"] == "firing":
                    return alert
            if time.monotonic() > end:
                raise TimeoutError(f"no alert {name} in {timeout} s; the webhook has "
                                   f"{[alert['labels'] for alert in self.received()]}")
            time.sleep(0.1)

    def query(self, expression):
        """Query Prometheus; return the current [({label: value}, number)]."""
        url = f"http://{self.server}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        rows = json.loads(self.fetch(url))["data"]["result"]
        return [(row["metric"], float(row["value"][1])) for row in rows]

    def close(self):
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()

    def __exit__(self, *_):
        self.close()
