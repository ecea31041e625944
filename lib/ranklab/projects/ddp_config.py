"""What the DDP project trains, on what and how: one frozen dataclass, checked when it is made."""

from dataclasses import dataclass, replace

from ranklab.data_parallel import scale_learning_rate
from ranklab.models.resnet import STAGES, ResNetConfig
from ranklab.trainer import PRECISIONS, LoopConfig, Schedule

COMPRESSIONS = ("none", "bf16", "fp16")
MODELS = {f"resnet{depth}": depth for depth in STAGES}
REFERENCE_BATCH = 256  # images in a step, for which `lr` is meant


@dataclass(frozen=True)
class Config:
    """The defaults are ResNet-50 on ImageNet as usual: 76 to 77% top-1 in published runs."""

    data: str = "synthetic"  # or a folder with train/<class>/ and val/<class>/
    model: str = "resnet50"
    width: int = 64
    norm: str = "batch"
    image: int = 224
    classes: int = 1000  # of synthetic images; a folder has its own
    images: int = 1_281_167  # synthetic ones to train on
    held_out: int = 50_000  # synthetic ones
    batch_per_rank: int = 256
    epochs: int = 90
    lr: float = 0.1  # for 256 images a step; it grows with their number
    warmup_epochs: float = 5
    momentum: float = 0.9
    weight_decay: float = 1e-4
    smoothing: float = 0.1  # of the labels
    smallest_crop: float = 0.08  # part of a training image's area
    flip: bool = True
    precision: str = "fp32"  # bf16, fp16: by autocast
    channels_last: bool = False
    compile: bool = False
    compress: str = "none"  # the gradients on their way
    bucket_mb: float = 0  # MiB of gradients in an all-reduce; 0: torch's 25, after a first of 1
    workers: int = 8  # per rank, that read images; 0: the rank reads them itself
    seed: int = 0
    log_every: int = 50  # steps; also how long a SIGTERM waits for an answer
    checkpoint: str | None = None  # a folder
    checkpoint_every: int = 0  # steps; 0: after each epoch

    def __post_init__(self):
        for name, allowed in (("model", MODELS), ("precision", PRECISIONS),
                              ("compress", COMPRESSIONS)):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of "
                                 f"{', '.join(allowed)}")  # fmt: skip
        for name in ("image", "classes", "images", "held_out", "batch_per_rank", "epochs",
                     "log_every"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("workers", "warmup_epochs", "checkpoint_every", "bucket_mb"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing={self.smoothing} must lie in [0, 1)")
        self.shape(self.classes)  # width and norm are checked there

    def loop(self, steps_per_epoch):
        """The LoopConfig: each epoch ends with a checkpoint and an evaluation."""
        return LoopConfig(self.batch_per_rank, self.weight_decay, 0.0, self.precision,
                          self.log_every, steps_per_epoch, self.checkpoint,
                          self.checkpoint_every or steps_per_epoch)  # fmt: skip

    def shape(self, classes):
        """The ResNetConfig for this many classes."""
        return ResNetConfig(MODELS[self.model], classes, self.width, self.norm)


# ResNet-50 with an eighth of the channels on 32 x 32 pixels: the same 161 parameters in 50 layers,
# the same buckets and hooks, and 3,000 times less to compute.
LAPTOP = replace(Config(), width=8, image=32, classes=10, images=2048, held_out=512, epochs=2,
                 batch_per_rank=32, warmup_epochs=1, workers=0, log_every=8)  # fmt: skip
FULL = replace(Config(), precision="bf16", channels_last=True)
SIZES = {"laptop": LAPTOP, "full": FULL}


def schedule(config, ranks, steps_per_epoch):
    """The Schedule for this many ranks: the rate grows with the images in a step."""
    images_per_step = config.batch_per_rank * ranks
    return Schedule(scale_learning_rate(config.lr, images_per_step, REFERENCE_BATCH),
                    round(config.warmup_epochs * steps_per_epoch),
                    config.epochs * steps_per_epoch)  # fmt: skip
