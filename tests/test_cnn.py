"""The CNN: its shapes, its norms, what it refuses."""

import pytest
import torch
import torch.nn.functional as F

from ranklab.models.cnn import CNN, CNNConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def cnn(**changes):
    torch.manual_seed(0)
    return CNN(CNNConfig(**changes))


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("norm", ["batch", "group", None])
@pytest.mark.parametrize("channels, image, stages, features", [
    (1, 8, 1, 32 * 4 * 4), (1, 28, 2, 64 * 7 * 7), (3, 32, 3, 128 * 4 * 4), (1, 4, 0, 16 * 4 * 4),
])  # fmt: skip
def test_logits_for_every_data_set(channels, image, stages, features, norm):
    model = cnn(in_channels=channels, image=image, classes=7, norm=norm)
    assert model(torch.randn(5, channels, image, image)).shape == (5, 7)
    assert len(model.stages) == stages
    assert model.head.in_features == features


def test_the_number_of_parameters():
    stem, stage, head = 9 * 16, 9 * 16 * 32, 32 * 16 * 10 + 10
    assert count(cnn()) == stem + 2 * 16 + stage + 2 * 32 + head
    assert count(cnn(norm="group")) == count(cnn())
    assert count(cnn(norm=None)) == stem + 16 + stage + 32 + head  # biases in place of norms


def test_only_batch_norm_sees_the_other_images_and_has_buffers():
    images = torch.randn(6, 1, 8, 8)
    for norm in ("batch", "group", None):
        model = cnn(norm=norm)
        alone = torch.cat([model(part) for part in images.split(2)])
        assert torch.allclose(model(images), alone, atol=1e-5) == (norm != "batch")
        assert bool(list(model.buffers())) == (norm == "batch")


def test_every_parameter_is_trained_and_the_loss_falls():
    model = cnn(width=8)
    images, labels = torch.randn(16, 1, 8, 8), torch.arange(16) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        assert all(p.grad is not None and p.grad.any() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("changes, sentence", [
    ({"width": 6}, "width=6 must be a multiple of 4"),
    ({"width": 0}, "width=0 must be a multiple of 4"),
    ({"image": 3}, "image=3 must be at least 4 pixels"),
    ({"classes": 0}, "classes=0 must be at least 1"),
    ({"in_channels": 0}, "in_channels=0 must be at least 1"),
    ({"norm": "layer"}, "norm='layer' must be one of 'batch', 'group', None"),
])  # fmt: skip
def test_a_wrong_shape_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        CNNConfig(**changes)


def test_images_of_another_size_are_refused():
    sentence = r"images of shape \(2, 1, 28, 28\) are not \(B, 1, 8, 8\)"
    with pytest.raises(ValueError, match=sentence):
        cnn()(torch.zeros(2, 1, 28, 28))
