"""A job on a real Slurm loses a node in the middle, is requeued, and goes on from its checkpoint.

Read lose_a_node. The job is labs/jobs/cluster.sbatch, which also trains 70B on 256 GPUs.
"""

import re
import sys
import time
from datetime import datetime

import torch

from ranklab.checkpoint.files import Files, complete, saves
from ranklab.cluster.hosts import Hosts, until
from ranklab.cluster.slurm import Slurm, missing
from ranklab.hybrid import parse_layout
from ranklab.projects.cluster.config import (
    GPUS, JOBS, LAYOUT, NODES, SHAPE, SLOW, SPARE, TRAINING, arguments,
)
from ranklab.projects.cluster.dashboard import numbers, watching
from ranklab.projects.hybrid.config import parse_shape
from ranklab.projects.hybrid.training import run

SBATCH = (f"--nodes={NODES}", f"--gpus-per-node={GPUS}", "--cpus-per-task=2", "--time=20",
          "--signal=TERM@60")
LIMIT = 60  # seconds for whatever comes next


def try_node_loss(say):
    """True if a job loses a node without harm. Without Slurm it says so."""
    if sentence := missing():
        say(f"job: not run; {sentence}")
        return True
    with Hosts(NODES + SPARE) as hosts, watching(hosts, say) as monitor:
        return lose_a_node(Slurm(hosts, GPUS), monitor, say)


def lose_a_node(slurm, monitor, say):
    """Submits the job, pulls the plug of a node, waits for the end, and prints all of it.
    True if the job ended as if nothing had happened.

    monitor  a Monitor on these hosts; None: without the dashboard's numbers and an alert
    """
    saved, usual, log = (slurm.folder / name for name in ("saved", "usual", "job.log"))
    job, nodes = submit(slurm, saved, log, monitor)
    say(f"job {job} on {' and '.join(nodes)}, {GPUS} ranks on each")
    if monitor:
        say("dashboard:", until(lambda: numbers(monitor), LIMIT, "numbers of all ranks", log))
    until(lambda: complete(saved), LIMIT, f"a checkpoint of job {job}", log)

    slurm.hosts.power_off(lost := nodes[-1])
    off = time.time()
    say(f"{lost} loses its power")
    if monitor:
        alert = alert_about(monitor, lost, off)
        say(f"after {alert['time'] - off:4.1f} s an alert reaches the webhook: "
            f"{alert['annotations']['summary']}")
    slurm.wait_for_node(lost, "down", LIMIT)
    say(f"after {time.time() - off:4.1f} s Slurm calls it DOWN: {slurm.why_down(lost)}")
    step, saves_before = Files(complete(saved)[-1]).index["step"], max(saves(saved))

    undisturbed = run("laptop", parse_layout(LAYOUT), shape=parse_shape(SHAPE),  # as it waits
                      timeout=LIMIT, checkpoint=str(usual), **TRAINING)
    slurm.wait_for(job, "RUNNING", LIMIT, log)
    nodes, began = slurm.nodes_of(job), datetime.fromisoformat(slurm.show(job)["StartTime"])
    say(f"after {began.timestamp() - off:4.1f} s the job starts again, on {' and '.join(nodes)}")
    if monitor:
        until(lambda: numbers(monitor) or slurm.state(job) != "RUNNING", LIMIT, "numbers", log)
        say("dashboard:", numbers(monitor) or "the job ended before a scrape of all ranks")
    slurm.wait_for(job, "COMPLETED", LIMIT, log)
    steps = TRAINING["checkpoint_every"] * (max(saves(saved)) - saves_before)
    say(f"from the checkpoint of step {step} it does {steps} steps")
    say_accounts(slurm, job, say)
    loss = float(re.findall(r"held out: ([\d.]+) nats", log.read_text())[-1])
    return (lost not in nodes and step + steps == TRAINING["steps"]
            and is_equal(saved, usual, loss, undisturbed["ranks"][0]["loss"], say))


def submit(slurm, saved, log, monitor):
    """(the job's number, its nodes), as soon as the job runs."""
    saved.mkdir()
    for name in slurm.hosts.names:
        slurm.hosts.shape(name, SLOW)
    job = slurm.submit(
        JOBS / "cluster.sbatch", *arguments(), *(["--export", monitor.targets] if monitor else []),
        options=[*SBATCH, f"--output={log}"], CHECKPOINT=str(saved), VENV=sys.prefix)
    slurm.wait_for(job, "RUNNING", LIMIT, log)
    return job, slurm.nodes_of(job)


def alert_about(monitor, host, since):
    """The first alert about this host since then."""
    return until(lambda: next((each for each in monitor.received() if each["time"] > since
                               and each["labels"].get("host") == host), None),
                 LIMIT, f"an alert about {host}", monitor.folder / "prometheus.log")


def say_accounts(slurm, job, say):
    """Prints the rows of sacct, once the last one says COMPLETED, which comes some seconds late."""
    if slurm.no_sacct:
        return say(slurm.no_sacct)
    rows = until(lambda: (found := slurm.accounting(job))[-1]["State"] == "COMPLETED" and found,
                 30, f"sacct's last row of job {job}", slurm.folder / "slurmdbd.log")
    for row in rows:
        say(f"    sacct: {row['State']:10} {row['NodeList']:12} {row['Elapsed']}")


def is_equal(saved, usual, loss, usual_loss, say):
    """Whether the last checkpoints are equal, bit for bit, and the losses (one has 4 digits)."""
    mine, other = state_of(saved), state_of(usual)
    differ = [name for name in mine.keys() | other.keys() if name not in mine or name not in other
              or not torch.equal(mine[name], other[name])]
    say(f"held out: {loss:.4f} nats; a run that nothing disturbs: {usual_loss:.4f}")
    say(f"of {len(mine)} tensors in the last checkpoint {len(differ)} differ from that run's")
    return not differ and abs(loss - usual_loss) < 1e-4


def state_of(folder):
    """{box: tensor} of the last checkpoint: weights and the optimizer's state."""
    files, state = Files(complete(folder)[-1]), {}
    for rank in range(files.index["ranks"]):
        state |= files.open(rank)["boxes"]
    return state
