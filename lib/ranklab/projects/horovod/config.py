"""How the BERT is trained, and what the command takes beside it."""

from dataclasses import dataclass, replace

from ranklab.basics.options import comma_list, existing_file, existing_folder, new_file, option
from ranklab.projects.runner import OnNodes
from ranklab.trainer import LoopConfig

COMPRESSIONS = ("none", "fp16")


@dataclass(frozen=True)
class Config(LoopConfig):
    """What to train and how; checked when it is made. The defaults suit two CPU cores."""

    weights: str | None = None
    n_ctx: int = option(32, "tokens of a text", least=1)
    vocab_size: int = option(4000, least=1)  # this and the next three: of the BERT from scratch
    width: int = option(64, least=1)
    n_layer: int = option(2, least=1)
    n_head: int = option(2, least=1)
    steps: int = option(60, "of the optimizer", least=1)
    batch: int = option(96, "texts in a step, over all ranks", least=1)
    micro_batch: int = 2**20  # a step is one piece: Horovod averages after one backward
    lr: float = option(8e-3, "the highest learning rate", least=0)
    warmup: int = option(6, "steps to the highest learning rate", least=0)
    final_lr: float = 0.0
    weight_decay: float = 0.01
    clip: float = 0.0
    log_every: int = 10
    seed: int = option(0, "of weights and order", least=0)

    def __post_init__(self):
        super().__post_init__()
        if self.width % self.n_head:
            raise ValueError(f"n_head={self.n_head} must divide width={self.width}")

    def check(self, ranks, texts):
        """The mean over ranks of their means is that of the batch only where all have as many."""
        if self.batch % ranks:
            raise ValueError(f"{ranks} ranks must divide batch={self.batch}")
        if texts < self.batch:
            raise ValueError(f"batch={self.batch} is more than the {texts} texts to train on")


# What suits weights that have learnt a language already.
WITH_WEIGHTS = Config(n_ctx=128, lr=5e-5, batch=32, steps=500, warmup=50)


@dataclass(frozen=True)
class Options(OnNodes):
    """What the command takes beside a Config."""

    without = ("weights", "vocab_size", "width", "n_layer", "n_head", "micro_batch", "checkpoint",
               "checkpoint_every")

    weights: str | None = option(None, "a folder with a BERT's weights and tokenizer",
                                 kind=existing_folder)
    data: str | None = option(None, "a .csv or .jsonl file with label and text", kind=existing_file)
    compressions: tuple = option(COMPRESSIONS, "of gradients on the wire: which, with commas",
                                 kind=comma_list(choices=COMPRESSIONS), flag="compression")
    trace: str | None = option(None, "write Horovod's timeline to this file", kind=new_file)
    read: str | None = option(None, "read a timeline, and nothing else", kind=existing_file)

    def settings(self):
        return replace(WITH_WEIGHTS, weights=self.weights) if self.weights else Config()
