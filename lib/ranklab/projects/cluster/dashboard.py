"""A real Prometheus on the controller of Hosts, and the numbers that the dashboard shows."""

import contextlib
import functools
import json
import sys

from ranklab.cluster.hosts import CONTROLLER
from ranklab.cluster.monitor import Monitor, missing
from ranklab.cluster.rules import silent_host_rule
from ranklab.projects.cluster.config import GPUS, JOBS, NODES

FETCH = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).read().decode())"
MFU, SPEED, STEP = "MFU", "tokens/s", "step time of each rank, until the collective"
WINDOW = "5s"  # instead of a minute or more, because a scrape comes every second


def watching(hosts, say):
    """A Monitor that alerts about silent hosts; None, with a message, if Prometheus is missing."""
    if missing():
        return contextlib.nullcontext(say(f"no dashboard and no alert: {missing()}"))
    return Monitor(hosts.folder / "monitor", [silent_host_rule(1) | {"for": "3s"}],
                   hosts.address(CONTROLLER), functools.partial(hosts.popen, CONTROLLER),
                   lambda url: hosts.run(CONTROLLER, [sys.executable, "-c", FETCH, url]))


def numbers(monitor):
    """What panels of labs/jobs/monitoring/dashboard.json show now, as a line; "" until all ranks of
    the job have been there for a WINDOW.
    """
    if len(monitor.query(f"train_tokens_total offset {WINDOW}")) < NODES * GPUS:
        return ""
    board = json.loads((JOBS / "monitoring" / "dashboard.json").read_text())
    texts = {each["title"]: each["targets"][0]["expr"].replace("$run", ".*")
             .replace("$__rate_interval", WINDOW).replace("[1m]", f"[{WINDOW}]")
             for each in board["panels"] if each["title"] in (MFU, SPEED, STEP)}
    mfu, speed, steps = (monitor.query(texts[name]) for name in (MFU, SPEED, STEP))
    if len(steps) != NODES * GPUS or not (mfu and speed):
        return ""
    steps = sorted((int(labels["rank"]), f"{1e3 * x:.0f}") for labels, x in steps)
    return (f"{speed[0][1]:,.0f} tokens/s, MFU {mfu[0][1]:.2%}; ranks 0 to {len(steps) - 1} "
            f"compute {' '.join(x for _, x in steps)} ms in a step")
