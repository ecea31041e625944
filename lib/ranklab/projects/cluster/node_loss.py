"""A job on a real Slurm loses a node in the middle, is requeued, and goes on from its checkpoint.

Read lose_a_node. The job is labs/jobs/cluster.sbatch, which also trains 70B on 256 GPUs.
"""

import re
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch

from ranklab.checkpoint.files import Files, complete, saves
from ranklab.cluster.hosts import until
from ranklab.hybrid import parse_layout
from ranklab.projects.cluster.config import (
    GPUS, LAYOUT, NODES, SHAPE, TRAINING, arguments,
)
from ranklab.projects.hybrid.config import parse_shape
from ranklab.projects.hybrid.training import run

SCRIPT = Path(__file__).resolve().parents[4] / "labs" / "jobs" / "cluster.sbatch"
SBATCH = (f"--nodes={NODES}", f"--gpus-per-node={GPUS}", "--cpus-per-task=2", "--time=20",
          "--signal=TERM@60")
LIMIT = 60  # seconds for whatever comes next


@dataclass
class NodeLoss:
    """What happened to the job."""

    job: int
    nodes: list  # on which it began
    nodes_after: list
    lost: str  # the node
    step: int  # of the last whole checkpoint
    steps_after: int  # that the job did when it had gone on
    steps: int  # of the whole training
    down_after: float  # seconds, until Slurm called the node DOWN
    again_after: float  # until it started the job again
    reason: str  # why it is DOWN, in Slurm's words
    rows: list  # of sacct
    loss: float  # held out, by the job's report
    usual_loss: float  # of a run that nothing disturbed
    tensors: int  # in the last checkpoint
    differ: list  # names of those that are not equal bit for bit to the undisturbed run's

    def is_good(self):
        return (self.lost not in self.nodes_after and not self.differ
                and self.step + self.steps_after == self.steps
                and abs(self.loss - self.usual_loss) < 1e-4)  # the report has four digits


def lose_a_node(slurm):
    """Submits the job, pulls the plug of a node, and waits until it has ended; a NodeLoss."""
    saved, usual, log = (slurm.folder / name for name in ("saved", "usual", "job.log"))
    saved.mkdir()
    job = slurm.submit(SCRIPT, *arguments(), options=[*SBATCH, f"--output={log}"],
                       CHECKPOINT=str(saved), VENV=sys.prefix)
    slurm.wait_for(job, "RUNNING", LIMIT, log)
    nodes = slurm.nodes_of(job)
    until(lambda: complete(saved), LIMIT, f"a checkpoint of job {job}", log)

    slurm.hosts.power_off(nodes[-1])
    off, wall = time.monotonic(), time.time()
    slurm.wait_for_node(nodes[-1], "down", LIMIT)
    down_after = time.monotonic() - off
    step, saves_before = Files(complete(saved)[-1]).index["step"], max(saves(saved))

    undisturbed = run("laptop", parse_layout(LAYOUT), shape=parse_shape(SHAPE),  # as it waits
                      timeout=LIMIT, checkpoint=str(usual), **TRAINING)
    slurm.wait_for(job, "RUNNING", LIMIT, log)
    nodes_after, started = slurm.nodes_of(job), slurm.show(job)["StartTime"]
    slurm.wait_for(job, "COMPLETED", LIMIT, log)
    mine, other = state_of(saved), state_of(usual)
    said = re.findall(r"held out: ([\d.]+) nats", log.read_text())
    return NodeLoss(
        job, nodes, nodes_after, nodes[-1], step,
        TRAINING["checkpoint_every"] * (max(saves(saved)) - saves_before), TRAINING["steps"],
        down_after,
        datetime.fromisoformat(started).timestamp() - wall, slurm.why_down(nodes[-1]),
        accounted(slurm, job), float(said[-1]), undisturbed["ranks"][0]["loss"], len(mine),
        [name for name in mine.keys() | other.keys() if name not in mine or name not in other
         or not torch.equal(mine[name], other[name])])


def accounted(slurm, job):
    """Rows of sacct, once the last one says COMPLETED: it comes some seconds late."""
    if slurm.no_sacct:
        return []
    until(lambda: slurm.accounting(job)[-1:] and slurm.accounting(job)[-1]["State"] == "COMPLETED",
          30, f"sacct's last row of job {job}", slurm.folder / "slurmdbd.log")
    return slurm.accounting(job)


def state_of(folder):
    """{box: tensor} of the last checkpoint: weights and the optimizer's state."""
    files, state = Files(complete(folder)[-1]), {}
    for rank in range(files.index["ranks"]):
        state |= files.open(rank)["boxes"]
    return state
