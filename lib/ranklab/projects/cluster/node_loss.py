"""A job on a real Slurm loses a node midway, is requeued, and resumes from its checkpoint.

Read lose_a_node. The job is labs/jobs/cluster.sbatch, which also trains 70B on 256 GPUs. A real
Prometheus on the controller watches it.
"""

import contextlib
import functools
import json
import re
import sys
import time
from datetime import datetime
from pathlib import Path

from ranklab.checkpoint.files import Files, complete, saves
from ranklab.cluster import monitor as prometheus
from ranklab.cluster.hosts import CONTROLLER, Hosts, until
from ranklab.cluster.rules import silent_host_rule
from ranklab.cluster.slurm import Slurm, missing
from ranklab.hybrid import parse_layout
from ranklab.projects.hybrid.config import parse_shape
from ranklab.projects.hybrid.training import run
from ranklab.projects.resilience.survive import differing, last_state

JOBS = Path(__file__).resolve().parents[4] / "labs" / "jobs"
NODES, GPUS, SPARE = 2, 2, 1  # nodes of the job, GPUs of each, spare nodes
SHAPE, LAYOUT = "4x32x4x32x256", "2x1x2,zero"
TRAINING = {"steps": 110, "batch": 8, "eval_batch": 16, "checkpoint_every": 10, "compare": False,
            "per_node": GPUS}  # of the hybrid project's settings
SLOW = 3  # Mbit/s of the job's links: slow, so that there is time to watch the job on any machine
SBATCH = (f"--nodes={NODES}", f"--gpus-per-node={GPUS}", "--cpus-per-task=2", "--time=20",
          "--signal=TERM@60")
LIMIT = 60  # seconds to wait for the next event
FETCH = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).read().decode())"
MFU, SPEED, STEP = "MFU", "tokens/s", "step time of each rank, until the collective"
WINDOW = "5s"  # instead of a minute or more, because a scrape comes every second


def arguments():
    """Return TRAINING as arguments of the hybrid project."""
    words = ["--size", "laptop", "--shape", SHAPE, "--layout", LAYOUT]
    for name, value in TRAINING.items():
        flag = name.replace("_", "-")
        words += [f"--no-{flag}"] if value is False else [f"--{flag}", value]
    return words


def try_node_loss(say):
    """Return whether a job survives the loss of a node; True, with a message, without Slurm."""
    if sentence := missing():
        say(f"job: not run; {sentence}")
        return True
    with Hosts(NODES + SPARE) as hosts, watching(hosts, say) as monitor:
        return lose_a_node(Slurm(hosts, GPUS), monitor, say)


def lose_a_node(slurm, monitor, say):
    """Submit the job, pull the plug on a node, wait for the end, and print each event.

    Returns True if the job ended as if nothing had happened.

    monitor  a Monitor on these hosts; None: without the dashboard's numbers and an alert
    """
    checkpoints, usual, log = (slurm.folder / name for name in ("saved", "usual", "job.log"))
    job, nodes = submit(slurm, checkpoints, log, monitor)
    say(f"job {job} on {' and '.join(nodes)}, {GPUS} ranks on each")
    if monitor:
        say("dashboard:", until(lambda: numbers(monitor), LIMIT, "numbers of all ranks", log))
    until(lambda: complete(checkpoints), LIMIT, f"a checkpoint of job {job}", log)

    slurm.hosts.power_off(node := nodes[-1])
    start = time.time()
    say(f"{node} loses its power")
    if monitor:
        alert = alert_about(monitor, node, start)
        say(f"after {alert['time'] - start:4.1f} s an alert reaches the webhook: "
            f"{alert['annotations']['summary']}")
    slurm.wait_for_node(node, "down", LIMIT)
    say(f"after {time.time() - start:4.1f} s Slurm calls it DOWN: {slurm.why_down(node)}")
    step, saves_before = Files(complete(checkpoints)[-1]).index["step"], max(saves(checkpoints))

    undisturbed = run("laptop", parse_layout(LAYOUT), shape=parse_shape(SHAPE),  # as it waits
                      timeout=LIMIT, checkpoint=str(usual), **TRAINING)
    slurm.wait_for(job, "RUNNING", LIMIT, log)
    nodes, begin = slurm.nodes_of(job), datetime.fromisoformat(slurm.show(job)["StartTime"])
    say(f"after {begin.timestamp() - start:4.1f} s the job starts again, on {' and '.join(nodes)}")
    if monitor:
        until(lambda: numbers(monitor) or slurm.state(job) != "RUNNING", LIMIT, "numbers", log)
        say("dashboard:", numbers(monitor) or "the job ended before a scrape of all ranks")
    slurm.wait_for(job, "COMPLETED", LIMIT, log)
    steps = TRAINING["checkpoint_every"] * (max(saves(checkpoints)) - saves_before)
    say(f"from the checkpoint of step {step} it does {steps} steps")
    say_accounts(slurm, job, say)
    loss = float(re.findall(r"held out: ([\d.]+) nats", log.read_text())[-1])
    return (node not in nodes and step + steps == TRAINING["steps"]
            and is_equal(checkpoints, usual, loss, undisturbed["ranks"][0]["loss"], say))


def submit(slurm, checkpoints, log, monitor):
    """Submit the job; return (its job ID, its nodes) as soon as it runs."""
    checkpoints.mkdir()
    for name in slurm.hosts.names:
        slurm.hosts.shape(name, SLOW)
    job = slurm.submit(
        JOBS / "cluster.sbatch", *arguments(), *(["--export", monitor.targets] if monitor else []),
        options=[*SBATCH, f"--output={log}"], CHECKPOINT=str(checkpoints), VENV=sys.prefix)
    slurm.wait_for(job, "RUNNING", LIMIT, log)
    return job, slurm.nodes_of(job)


def alert_about(monitor, host, since):
    """Wait for the first alert about this host after `since`; return it."""
    return until(lambda: next((each for each in monitor.received() if each["time"] > since
                               and each["labels"].get("host") == host), None),
                 LIMIT, f"an alert about {host}", monitor.folder / "prometheus.log")


def say_accounts(slurm, job, say):
    """Print the rows of sacct once the last one is COMPLETED, some seconds after the job ends."""
    if slurm.no_sacct:
        return say(slurm.no_sacct)
    rows = until(lambda: (table := slurm.accounting(job))[-1]["State"] == "COMPLETED" and table,
                 30, f"sacct's last row of job {job}", slurm.folder / "slurmdbd.log")
    for row in rows:
        say(f"    sacct: {row['State']:10} {row['NodeList']:12} {row['Elapsed']}")


def is_equal(checkpoints, usual, loss, usual_loss, say):
    """Return whether the last checkpoints are equal bit for bit, and the losses to 4 digits."""
    state = last_state(checkpoints)
    differ = differing(state, last_state(usual))
    say(f"held out: {loss:.4f} nats; a run that nothing disturbs: {usual_loss:.4f}")
    say(f"of {len(state)} tensors in the last checkpoint {len(differ)} differ from that run's")
    return not differ and abs(loss - usual_loss) < 1e-4


# --- the dashboard --------------------------------------------------------------------------------

def watching(hosts, say):
    """Return a Monitor that alerts about silent hosts; None, with a message, without Prometheus."""
    if sentence := prometheus.missing():
        return contextlib.nullcontext(say(f"no dashboard and no alert: {sentence}"))
    return prometheus.Monitor(
        hosts.folder / "monitor", [silent_host_rule(1) | {"for": "3s"}], hosts.address(CONTROLLER),
        functools.partial(hosts.popen, CONTROLLER),
        lambda url: hosts.run(CONTROLLER, [sys.executable, "-c", FETCH, url]))


def numbers(monitor):
    """Return the current values of panels of labs/jobs/monitoring/dashboard.json, as a line.

    "" until all ranks of the job have been up for a WINDOW.
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
