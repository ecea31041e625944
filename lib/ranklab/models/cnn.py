"""A small convolutional network: digits in seconds; MNIST and CIFAR-10 with the same code.

B batch, C channels, H and W height and width, K classes. It knows nothing of ranks.
Each stage doubles the channels and halves the sides, as long as 4 x 4 is left for the head.
The children have plain names (`stem`, `stages`, `head`; in each of the first two `conv`, `norm`,
`relu`, `pool`), because data parallelism shows gradients and statistics by name.
"""

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

NORMS = ("batch", "group", None)
GROUPS = 4  # of channels, for group norm
SMALLEST = 4  # pixels a side: no stage goes below


@dataclass(frozen=True)
class CNNConfig:
    """The shape of a CNN, checked on creation. The defaults suit scikit-learn's digits."""

    in_channels: int = 1  # 3: colour
    image: int = 8  # H = W
    classes: int = 10  # K
    width: int = 16  # channels after the stem
    norm: str | None = "batch"  # "batch": has buffers, and depends on the batch's other images

    def __post_init__(self):
        for name in ("in_channels", "classes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.image < SMALLEST:
            raise ValueError(f"image={self.image} must be at least {SMALLEST} pixels")
        if self.width < 1 or self.width % GROUPS:
            raise ValueError(f"width={self.width} must be a multiple of {GROUPS} above 0")
        if self.norm not in NORMS:
            raise ValueError(f"norm={self.norm!r} must be one of {', '.join(map(repr, NORMS))}")

    @property
    def halvings(self):
        """The number of stages after the stem: 1 for 8 pixels, 2 for 28, 3 for 32."""
        return (self.image // SMALLEST).bit_length() - 1


def convolution(config, c_in, c_out, pool):
    """Make a 3 x 3 convolution, its norm and a ReLU; `pool` halves the sides."""
    layers = OrderedDict(conv=nn.Conv2d(c_in, c_out, 3, padding=1, bias=config.norm is None))
    if config.norm == "batch":
        layers["norm"] = nn.BatchNorm2d(c_out)
    elif config.norm == "group":
        layers["norm"] = nn.GroupNorm(GROUPS, c_out)
    layers["relu"] = nn.ReLU()
    if pool:
        layers["pool"] = nn.MaxPool2d(2)
    return nn.Sequential(layers)


class CNN(nn.Module):
    """Images in, logits out."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        channels = [config.width * 2**i for i in range(config.halvings + 1)]
        side = config.image // 2**config.halvings
        self.stem = convolution(config, config.in_channels, config.width, pool=False)
        self.stages = nn.Sequential(*(
            convolution(config, c_in, c_out, pool=True)
            for c_in, c_out in zip(channels, channels[1:])
        ))  # fmt: skip
        self.head = nn.Linear(channels[-1] * side**2, config.classes)

    def forward(self, images):  # (B, C, H, W) -> (B, K)
        wanted = (self.config.in_channels, self.config.image, self.config.image)
        if tuple(images.shape[1:]) != wanted:
            raise ValueError(f"images of shape {tuple(images.shape)} are not (B, {wanted[0]}, "
                             f"{wanted[1]}, {wanted[2]})")  # fmt: skip
        x = self.stages(self.stem(images))  # (B, c, h, w)
        return self.head(x.flatten(1))
