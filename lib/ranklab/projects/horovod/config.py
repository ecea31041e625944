"""What the command takes, and how the BERT is trained."""

from dataclasses import dataclass, replace

from ranklab.options import (
    check_options, comma_list, existing_file, existing_folder, new_file, option,
)
from ranklab.projects.runner import OnNodes
from ranklab.trainer import PRECISIONS, LoopConfig, Schedule

COMPRESSIONS = ("none", "fp16")


@dataclass(frozen=True)
class Config:
    """What to train and how; checked when it is made. The defaults suit two CPU cores."""

    weights: str | None = None
    n_ctx: int = option(32, "tokens of a text", least=1)
    # The next four are those of the BERT that begins from scratch.
    vocab_size: int = option(4000, least=1)
    width: int = option(64, least=1)
    n_layer: int = option(2, least=1)
    n_head: int = option(2, least=1)
    steps: int = option(60, "of the optimizer", least=1)
    batch: int = option(96, "texts in a step, over all ranks", least=1)
    lr: float = option(8e-3, "the highest learning rate", least=0)
    warmup: float = option(0.1, "of all steps", least=0)
    compression: str = option("none", "of gradients on the wire", COMPRESSIONS)
    precision: str = option("fp32", "bf16, fp16: by autocast", PRECISIONS)
    seed: int = option(0, "of weights and order", least=0)

    def __post_init__(self):
        check_options(self)
        if self.width % self.n_head:
            raise ValueError(f"n_head={self.n_head} must divide width={self.width}")

    def loop(self):
        """The LoopConfig: a step is one piece, and nothing is clipped."""
        return LoopConfig(self.batch, 0.01, 0.0, self.precision, log_every=10)

    def schedule(self):
        return Schedule(self.lr, max(1, round(self.warmup * self.steps)), self.steps)

    def check(self, ranks, texts=None):
        """The mean over ranks of their means is that of the batch only where all have as many."""
        if self.batch % ranks:
            raise ValueError(f"{ranks} ranks must divide batch={self.batch}")
        if texts is not None and texts < self.batch:
            raise ValueError(f"batch={self.batch} is more than the {texts} texts to train on")


# What suits weights that have learnt a language already.
WITH_WEIGHTS = Config(n_ctx=128, lr=5e-5, batch=32, steps=500)


@dataclass(frozen=True)
class Options(OnNodes):
    """What the command takes beside a Config."""

    without = ("weights", "vocab_size", "width", "n_layer", "n_head", "warmup", "compression")

    weights: str | None = option(None, "a folder with a BERT's weights and tokenizer",
                                 kind=existing_folder)
    data: str | None = option(None, "a .csv or .jsonl file with label and text", kind=existing_file)
    compressions: tuple = option(COMPRESSIONS, "of gradients on the wire: which, with commas",
                                 kind=comma_list(choices=COMPRESSIONS), flag="compression")
    # Not "--timeline": horovodrun looks at all of the line, and has two that begin so.
    trace: str | None = option(None, "write Horovod's timeline to this file", kind=new_file)
    read: str | None = option(None, "read a timeline, and nothing else", kind=existing_file)
    tune: bool = option(False, "some steps at each fusion threshold")
    real: bool = option(False, "under horovodrun: horovod.torch")

    def settings(self):
        return replace(WITH_WEIGHTS, weights=self.weights) if self.weights else Config()
