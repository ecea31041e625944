"""What is trained on the cluster, how the links are, and what the command takes."""

from dataclasses import dataclass, fields

from ranklab.options import option
from ranklab.projects.hybrid.config import Config as HybridConfig
from ranklab.projects.runner import Options as Command

SHAPE, LAYOUT = "4x32x4x32x256", "2x1x2,zero"
PARTS = ("job", "links")
NODES, GPUS = 2, 2  # of the job
SPARE = 1  # node


@dataclass(frozen=True)
class Config(HybridConfig):
    """How to train; checked when it is made."""

    steps: int = 80
    batch: int = 8  # sequences
    eval_batch: int = 16
    checkpoint_every: int = 10
    compare: bool = False
    per_node: int = GPUS

    def changed(self):
        """{name: value} of what differs from the hybrid project's own settings."""
        usual = HybridConfig()
        return {field.name: getattr(self, field.name) for field in fields(self)
                if getattr(self, field.name) != getattr(usual, field.name)}

    def arguments(self):
        """The same, as arguments of the hybrid project."""
        words = ["--size", "laptop", "--shape", SHAPE, "--layout", LAYOUT]
        for name, value in self.changed().items():
            flag = name.replace("_", "-")
            words += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
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

    def parts(self):
        return PARTS if self.only is None else (self.only,)
