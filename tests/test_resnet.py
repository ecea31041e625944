"""ResNet: torchvision's sizes, names and strides; what it computes at first; what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from ranklab.models.resnet import BasicBlock, Bottleneck, ResNet, ResNetConfig

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def resnet(**changes):
    torch.manual_seed(0)
    return ResNet(ResNetConfig(**{"depth": 18, "classes": 10, "width": 8, **changes}))


def on_meta(depth):
    with torch.device("meta"):
        return ResNet(ResNetConfig(depth))


@pytest.mark.parametrize("depth, count", [
    (18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160),
])
def test_the_number_of_parameters_is_torchvisions(depth, count):
    assert sum(p.numel() for p in on_meta(depth).parameters()) == count


def test_resnet50_takes_4_09_billion_multiply_adds_at_224_pixels():
    with FlopCounterMode(display=False) as counter:
        logits = on_meta(50)(torch.zeros(1, 3, 224, 224, device="meta"))
    assert counter.get_total_flops() == 2 * 4_089_184_256
    assert logits.shape == (1, 1000)


def torchvisions_names(depth):
    """The keys of torchvision's state dict, in its order."""
    def norm(name):
        return [f"{name}.{part}" for part in ("weight", "bias", "running_mean", "running_var",
                                              "num_batches_tracked")]

    convs = 3 if depth >= 50 else 2
    names = ["conv1.weight", *norm("bn1")]
    for stage, blocks in enumerate(BLOCKS[depth], 1):
        for block in range(blocks):
            here = f"layer{stage}.{block}"
            for i in range(1, convs + 1):
                names += [f"{here}.conv{i}.weight", *norm(f"{here}.bn{i}")]
            if block == 0 and (stage > 1 or depth >= 50):
                names += [f"{here}.downsample.0.weight", *norm(f"{here}.downsample.1")]
    return [*names, "fc.weight", "fc.bias"]


@pytest.mark.parametrize("depth", BLOCKS)
def test_the_names_are_torchvisions(depth):
    assert list(on_meta(depth).state_dict()) == torchvisions_names(depth)


def test_the_shapes_and_strides_are_those_of_version_1_5():
    model = on_meta(50)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["layer1.0.downsample.0.weight"] == (256, 64, 1, 1)
    assert shapes["layer4.2.conv2.weight"] == (512, 512, 3, 3)
    assert shapes["layer4.2.conv3.weight"] == (2048, 512, 1, 1)
    assert shapes["fc.weight"] == (1000, 2048)
    first = model.layer2[0]
    assert (first.conv1.stride, first.conv2.stride) == ((1, 1), (2, 2))
    assert model.layer1[0].conv2.stride == (1, 1)


@pytest.mark.parametrize("depth", [18, 50])
def test_every_block_begins_as_the_identity(depth):
    model = resnet(depth=depth)
    blocks = [m for m in model.modules() if isinstance(m, BasicBlock | Bottleneck)]
    assert len(blocks) == sum(BLOCKS[depth])
    for block in blocks:
        x = torch.randn(2, block.conv1.in_channels, 4, 4).relu()
        around = x if block.downsample is None else block.downsample(x)
        assert torch.equal(block(x), around.relu())


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("image", [32, 45, 64])
def test_logits_for_any_size_and_layout(norm, image):
    model, images = resnet(depth=50, norm=norm), torch.randn(3, 3, image, image)
    logits = model(images)
    assert logits.shape == (3, 10)
    other = model.to(memory_format=torch.channels_last)
    again = other(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(again, logits, atol=1e-4, rtol=1e-4)


def test_only_batch_norm_sees_the_other_images():
    images = torch.randn(6, 3, 32, 32)
    for norm in ("batch", "group"):
        model = resnet(norm=norm)
        alone = torch.cat([model(part) for part in images.split(2)])
        assert torch.allclose(model(images), alone, atol=1e-5) == (norm == "group")
        assert bool(list(model.buffers())) == (norm == "batch")


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_every_parameter_is_trained_and_the_loss_falls(norm):
    model = resnet(norm=norm)
    images, labels = torch.randn(16, 3, 32, 32), torch.arange(16) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad.any() for p in model.parameters())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("changes, sentence", [
    ({"depth": 20}, "depth=20 must be one of 18, 34, 50, 101"),
    ({"classes": 0}, "classes=0 must be at least 1"),
    ({"width": 4}, "width=4 must be at least 8"),
    ({"norm": "layer"}, "norm='layer' must be one of 'batch', 'group'"),
    ({"norm": "group", "width": 24}, "width=24 must divide or be a multiple of 16"),
])
def test_a_wrong_shape_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        ResNetConfig(**changes)


def test_images_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"images of shape \(2, 1, 8, 8\) are not \(B, 3, H, W\)"):
        resnet()(torch.zeros(2, 1, 8, 8))
