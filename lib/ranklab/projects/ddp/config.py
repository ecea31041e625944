"""What the DDP project trains, on what and how: one frozen dataclass, checked when it is made."""

from dataclasses import dataclass, replace
from pathlib import Path

from ranklab.data_parallel import scale_learning_rate
from ranklab.models.resnet import STAGES, ResNetConfig
from ranklab.options import check_options, existing_folder, new_file, new_folder, option
from ranklab.projects.runner import Drawn, OnRanks, Resumed
from ranklab.trainer import PRECISIONS, LoopConfig, Schedule

COMPRESSIONS = ("none", "bf16", "fp16")
MODELS = {f"resnet{depth}": depth for depth in STAGES}
REFERENCE_BATCH = 256  # images in a step, for which `lr` is meant


def images(text):
    """A type: "synthetic", or a folder as ImageNet's."""
    for part in ("train", "val") * (text != "synthetic"):
        existing_folder(str(Path(existing_folder(text), part)))
    return text


@dataclass(frozen=True)
class Config:
    """The defaults are ResNet-50 on ImageNet as usual: 76 to 77% top-1 in published runs."""

    data: str = option("synthetic", "synthetic, or a folder with train/<class>/ and val/<class>/",
                       kind=images)
    model: str = option("resnet50", "which ResNet", MODELS)
    width: int = option(64, "channels of the first layer", least=1)
    norm: str = option("batch", "batch, or group: the same for any number of ranks",
                       ("batch", "group"))
    image: int = option(224, "pixels along each side", least=1)
    classes: int = option(1000, "of synthetic images; a folder has its own", least=1)
    images: int = option(1_281_167, "synthetic ones to train on", least=1)
    held_out: int = option(50_000, "synthetic ones to score on", least=1)
    batch_per_rank: int = option(
        256, "images in a step on each rank; the learning rate grows with all of them", least=1)
    epochs: int = option(90, "how often each image is seen", least=1)
    lr: float = option(0.1, "for 256 images a step", least=0)
    warmup_epochs: float = option(5, "in which the learning rate grows", least=0)
    momentum: float = option(0.9, "of SGD", least=0)
    weight_decay: float = option(1e-4, "of SGD", least=0)
    smoothing: float = option(0.1, "of the labels", least=0)
    smallest_crop: float = option(0.08, "part of the area that a random crop keeps at least")
    flip: bool = option(True, "mirror half of the images")
    precision: str = option("fp32", "bf16, fp16: by autocast", PRECISIONS)
    channels_last: bool = option(False, "the layout that tensor cores want")
    compile: bool = option(False, "torch.compile the model")
    compress: str = option("none", "the gradients on their way", COMPRESSIONS)
    bucket_mb: float = option(
        0, "MiB of gradients in an all-reduce; 0: torch's 25, after a first of 1", least=0)
    workers: int = option(8, "processes per rank that read images; 0: the rank itself", least=0)
    seed: int = option(0, "of weights, order and crops", least=0)
    log_every: int = option(50, "steps; also how long a SIGTERM waits for an answer", least=1)
    checkpoint: str | None = option(None, "save to this folder", kind=new_folder)
    checkpoint_every: int = option(0, "steps; by default after each epoch", least=0)

    def __post_init__(self):
        check_options(self)
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing={self.smoothing} must lie in [0, 1)")
        self.shape(self.classes)  # width is checked there

    def shape(self, classes):
        """The ResNetConfig for this many classes."""
        return ResNetConfig(MODELS[self.model], classes, self.width, self.norm)

    def loop(self, steps_per_epoch):
        """The LoopConfig: each epoch ends with a checkpoint and an evaluation."""
        return LoopConfig(self.batch_per_rank, self.weight_decay, 0.0, self.precision,
                          self.log_every, steps_per_epoch, self.checkpoint,
                          self.checkpoint_every or steps_per_epoch)

    def schedule(self, ranks, steps_per_epoch):
        """The Schedule: the rate grows with the images in a step."""
        peak = scale_learning_rate(self.lr, self.batch_per_rank * ranks, REFERENCE_BATCH)
        return Schedule(peak, round(self.warmup_epochs * steps_per_epoch),
                        self.epochs * steps_per_epoch)


# ResNet-50 with an eighth of the channels on 32 x 32 pixels: the same 161 parameters in 50 layers,
# the same buckets and hooks, and 3,000 times less to compute.
LAPTOP = replace(Config(), width=8, image=32, classes=10, images=2048, held_out=512, epochs=2,
                 batch_per_rank=32, warmup_epochs=1, workers=0, log_every=8)
FULL = replace(Config(), precision="bf16", channels_last=True)
SIZES = {"laptop": LAPTOP, "full": FULL}


@dataclass(frozen=True)
class Options(OnRanks, Resumed, Drawn):
    """What the command takes beside Config."""

    size: str = option("laptop", "the other defaults", SIZES)
    scaling: bool = option(False, "strong and weak scaling; --figure draws it")
    profile: str | None = option(None, "a trace of a few steps in this file, for Perfetto",
                                 kind=new_file)
    data_parallel: bool = option(False, "nn.DataParallel against DDP")

    def __post_init__(self):
        super().__post_init__()
        if self.figure and not self.scaling:
            raise ValueError("--figure draws what --scaling has found")

    def settings(self):
        return SIZES[self.size]
