"""What is trained on the cluster, how the links are, and what the command takes."""

from dataclasses import dataclass

from ranklab.options import option
from ranklab.projects.runner import Options as Command

NODES, GPUS, SPARE = 2, 2, 1  # nodes of the job, GPUs of each, nodes more
SHAPE, LAYOUT = "4x32x4x32x256", "2x1x2,zero"
TRAINING = {"steps": 80, "batch": 8, "eval_batch": 16, "checkpoint_every": 10, "compare": False,
            "per_node": GPUS}  # of the hybrid project's settings
PARTS = ("job", "links")


def arguments():
    """The same, as arguments of the hybrid project."""
    words = ["--size", "laptop", "--shape", SHAPE, "--layout", LAYOUT]
    for name, value in TRAINING.items():
        flag = name.replace("_", "-")
        words += [f"--no-{flag}"] if value is False else [f"--{flag}", value]
    return words


@dataclass(frozen=True)
class Links:
    """Two hosts of two ranks each, and what is done to the links between them."""

    mbit: int = 200
    nbytes: int = 4 << 20  # of the tensor that is summed
    rounds: int = 4
    flap: float = 2.0  # seconds
    limit: float = 6.0  # seconds, of a collective


@dataclass(frozen=True)
class Options(Command):
    """What the command takes."""

    only: str | None = option(None, "one part", choices=(None, *PARTS))
