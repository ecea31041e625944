"""What is trained on the cluster, and what the command takes."""

from dataclasses import dataclass
from pathlib import Path

from ranklab.basics.options import option
from ranklab.projects.runner import Options as Command

JOBS = Path(__file__).resolve().parents[4] / "labs" / "jobs"
NODES, GPUS, SPARE = 2, 2, 1  # nodes of the job, GPUs of each, spare nodes
SHAPE, LAYOUT = "4x32x4x32x256", "2x1x2,zero"
TRAINING = {"steps": 110, "batch": 8, "eval_batch": 16, "checkpoint_every": 10, "compare": False,
            "per_node": GPUS}  # of the hybrid project's settings
SLOW = 3  # Mbit/s of the job's links, so that there is time to watch the job on any machine


def arguments():
    """TRAINING, as arguments of the hybrid project."""
    words = ["--size", "laptop", "--shape", SHAPE, "--layout", LAYOUT]
    for name, value in TRAINING.items():
        flag = name.replace("_", "-")
        words += [f"--no-{flag}"] if value is False else [f"--{flag}", value]
    return words


@dataclass(frozen=True)
class Options(Command):
    """What the command takes."""

    only: str | None = option(None, "one part", choices=(None, "job", "links"))
