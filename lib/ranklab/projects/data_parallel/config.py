"""How the CNN of the data-parallel project is trained, and what a run can leave out."""

from dataclasses import dataclass

from ranklab.basics.options import check_options, existing_folder, option, positive
from ranklab.projects.runner import Drawn, OnRanks

# What a run can leave out, and what is wrong then.
PIECES = {
    "broadcast": "every rank starts from its own weights",
    "average": "every rank steps along its own gradient, and keeps its own statistics",
    "mean": "gradients are summed, not averaged",
    "shard": "every rank takes rank 0's images",
    "epoch": "every epoch has the same order",
    "buffers": "every rank keeps its own batch-norm statistics",
}


@dataclass(frozen=True)
class Config:
    """How to train; checked when it is made. The defaults suit the digits."""

    data: str = option("digits", "which images", ("digits", "mnist", "cifar10"))
    folder: str | None = option(None, "where the files of mnist or cifar10 are",
                                kind=existing_folder)
    epochs: int = option(3, "how often each image is seen", least=1)
    batch: int = option(64, "images in a step, over all ranks", least=1)
    lr: float = option(0.12, "right for --base-batch", least=0)
    base_batch: int = option(16, "images in a step for which --lr is meant", least=1)
    warmup: int = option(1, "epochs", least=0)
    momentum: float = option(0.0, "of SGD", least=0)
    weight_decay: float = option(0.0, "of SGD", least=0)
    width: int = option(8, "channels of the first layer", least=1)
    norm: str = option("batch", "sync: batch norm over all ranks",
                       ("batch", "sync", "group", "none"))
    precision: str = option("fp32", "bf16: by autocast", ("fp32", "bf16"))
    without: tuple[str, ...] = option((), f"with commas, of: {', '.join(PIECES)}")

    def __post_init__(self):
        check_options(self)
        if unknown := set(self.without) - set(PIECES):
            raise ValueError(f"without={min(unknown)!r}: the pieces are {', '.join(PIECES)}")


TRAINING = {
    "digits": Config(),
    "mnist": Config("mnist", epochs=5, batch=512, lr=0.05, base_batch=128, momentum=0.9, width=16),
    "cifar10": Config("cifar10", epochs=30, batch=512, lr=0.05, base_batch=128, warmup=5,
                      momentum=0.9, weight_decay=5e-4, width=64),
}


@dataclass(frozen=True)
class Options(OnRanks, Drawn):
    """What the command takes beside Config."""

    data: str = "digits"  # also of Config, which says more of it
    seeds: int = option(3, "how many runs of each kind", kind=positive)

    def settings(self):
        return TRAINING[self.data]
