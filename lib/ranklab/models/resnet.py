"""ResNet, the benchmark of image training: 25.6 million parameters at its usual size, ResNet-50.

B batch, C channels, H and W height and width, K classes. It knows nothing of ranks.
The children have torchvision's names, so its weights load: load_state_dict(torch.load(file)).
With a smaller `width` and smaller images the same 50 layers run on a laptop.
Paper: He et al. 2016, Deep Residual Learning for Image Recognition
"""

from dataclasses import dataclass

from torch import nn

STAGES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}  # blocks
BOTTLENECK = 50  # from this depth on a block is a bottleneck
NORMS = ("batch", "group")
PER_GROUP = 16  # channels in a group, for group norm
# With fewer, the process dies on a CPU without AVX-512: oneDNN 3.12 (torch 2.13) writes outside of
# its memory in the backward of a 1 x 1 convolution with stride 2, in channels-last.
LEAST_WIDTH = 8


@dataclass(frozen=True)
class ResNetConfig:
    """The shape of a ResNet, checked on creation. The defaults are ResNet-50 for ImageNet."""

    depth: int = 50
    classes: int = 1000  # K
    width: int = 64  # channels after the stem; each of the last three stages doubles them
    norm: str = "batch"  # "group" depends on one image only, whatever the batch size

    def __post_init__(self):
        if self.depth not in STAGES:
            raise ValueError(f"depth={self.depth} must be one of {', '.join(map(str, STAGES))}")
        for name, least in (("classes", 1), ("width", LEAST_WIDTH)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.norm not in NORMS:
            raise ValueError(f"norm={self.norm!r} must be one of {', '.join(map(repr, NORMS))}")
        if self.norm == "group" and self.width % PER_GROUP and PER_GROUP % self.width:
            raise ValueError(f"width={self.width} must divide or be a multiple of {PER_GROUP}, "
                             "the channels in a group of group norm")  # fmt: skip


def make_norm(config, channels):
    """Make the norm of `config` over `channels` channels."""
    if config.norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(max(1, channels // PER_GROUP), channels)


def conv(c_in, c_out, kernel, stride=1):
    """Make a convolution that divides the sides by `stride`; it has no bias, the norm has one."""
    return nn.Conv2d(c_in, c_out, kernel, stride, padding=kernel // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut around them: ResNet-18 and 34."""

    expansion = 1  # channels out, per channel inside

    def __init__(self, config, c_in, channels, stride):
        super().__init__()
        self.conv1 = conv(c_in, channels, 3, stride)
        self.bn1 = make_norm(config, channels)
        self.conv2 = conv(channels, channels, 3)
        self.bn2 = make_norm(config, channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = way_around(config, c_in, channels, stride)

    def forward(self, x):  # (B, c_in, H, W) -> (B, C, H/stride, W/stride)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1 x 1 down to `channels`, 3 x 3, 1 x 1 up to four times as many: ResNet-50 and deeper.

    Version 1.5: the 3 x 3 has the stride. In the paper the first 1 x 1 has it, and so throws away
    three quarters of its input.
    """

    expansion = 4

    def __init__(self, config, c_in, channels, stride):
        super().__init__()
        c_out = channels * self.expansion
        self.conv1 = conv(c_in, channels, 1)
        self.bn1 = make_norm(config, channels)
        self.conv2 = conv(channels, channels, 3, stride)
        self.bn2 = make_norm(config, channels)
        self.conv3 = conv(channels, c_out, 1)
        self.bn3 = make_norm(config, c_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = way_around(config, c_in, c_out, stride)

    def forward(self, x):  # (B, c_in, H, W) -> (B, 4C, H/stride, W/stride)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


def way_around(config, c_in, c_out, stride):
    """Make the 1 x 1 convolution that gives a block's input the shape of its output.

    Returns: None if the input can be added as it is.
    """
    if c_in == c_out and stride == 1:
        return None
    return nn.Sequential(conv(c_in, c_out, 1, stride), make_norm(config, c_out))


class ResNet(nn.Module):
    """Images in, logits out."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        block = Bottleneck if config.depth >= BOTTLENECK else BasicBlock
        self.conv1 = conv(3, config.width, 7, stride=2)
        self.bn1 = make_norm(config, config.width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        c_in = config.width
        for stage, blocks in enumerate(STAGES[config.depth]):
            channels, layers = config.width * 2**stage, []
            for place in range(blocks):
                halves = stage > 0 and place == 0  # the pool has done it for the first stage
                layers.append(block(config, c_in, channels, stride=2 if halves else 1))
                c_in = channels * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(c_in, config.classes)
        self.reset_parameters()

    def reset_parameters(self):
        """Draw fresh weights, by He's method for convolutions.

        Each block begins as the identity, because the weight of its last norm is zero (Goyal et al.
        2017): this helps the start of training with a large batch.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)
            elif isinstance(module, BasicBlock):
                nn.init.zeros_(module.bn2.weight)

    def forward(self, images):  # (B, 3, H, W) -> (B, K)
        if images.dim() != 4 or images.shape[1] != 3:
            raise ValueError(f"images of shape {tuple(images.shape)} are not (B, 3, H, W)")
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))  # (B, C, H/4, W/4)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # (B, c, H/32, W/32)
        return self.fc(self.avgpool(x).flatten(1))
