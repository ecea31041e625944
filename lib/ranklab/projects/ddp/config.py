"""What the DDP project trains, on what and how: one frozen dataclass, checked when it is made."""

from dataclasses import dataclass

from ranklab.basics.options import existing_folder, new_file, option
from ranklab.models.resnet import STAGES, ResNetConfig
from ranklab.projects.ddp.image_trainer import ImageConfig
from ranklab.projects.runner import Drawn, OnRanks, Resumed

MODELS = {f"resnet{depth}": depth for depth in STAGES}


@dataclass(frozen=True)
class Config(ImageConfig):
    """The defaults are ResNet-50 on ImageNet as usual: 76 to 77% top-1 in published runs."""

    data: str | None = option(None, "a folder with train/<class>/ and val/<class>/; by default "
                              "made-up images", kind=existing_folder)
    model: str = option("resnet50", "which ResNet", MODELS)
    width: int = option(64, "channels of the first layer", least=1)
    norm: str = option("batch", "batch, or group: the same for any number of ranks",
                       ("batch", "group"))
    image: int = option(224, "pixels along each side", least=1)
    classes: int = option(1000, "of made-up images; a folder has its own", least=1)
    images: int = option(1_281_167, "made-up ones to train on", least=1)
    held_out: int = option(50_000, "made-up ones to score on", least=1)
    smallest_crop: float = option(0.08, "part of the area that a random crop keeps at least")
    flip: bool = option(True, "mirror half of the images")
    compile: bool = option(False, "torch.compile the model")
    compress: bool = option(False, "gradients travel as float16, by compress_fp16_hook")

    def __post_init__(self):
        super().__post_init__()
        self.shape(self.classes)  # width is checked there

    def shape(self, classes):
        """The ResNetConfig for this many classes."""
        return ResNetConfig(MODELS[self.model], classes, self.width, self.norm)


# ResNet-50 with an eighth of the channels on 32 x 32 pixels: the same 161 parameters in 50 layers,
# the same hooks, and 3,000 times less to compute.
LAPTOP = Config(width=8, image=32, classes=10, images=2048, held_out=512, epochs=2,
                batch_per_rank=32, warmup_epochs=1, workers=0, log_every=8)
SIZES = {"laptop": LAPTOP, "full": Config(precision="bf16")}


@dataclass(frozen=True)
class Options(OnRanks, Resumed, Drawn):
    """What the command takes beside Config."""

    size: str = option("laptop", "the other defaults", SIZES)
    scaling: bool = option(False, "strong and weak scaling; --figure draws it")
    profile: str | None = option(None, "a trace of a few steps in this file, for Perfetto",
                                 kind=new_file)

    def __post_init__(self):
        super().__post_init__()
        if self.figure and not self.scaling:
            raise ValueError("--figure draws what --scaling has found")

    def settings(self):
        return SIZES[self.size]
