"""Folders of real JPEGs: labels, crops, flips, what is broken; and the made-up images."""

import math
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from ranklab.data.image_folder import (
    DEVIATION, MEAN, Augment, ImageFolder, Normalise, SyntheticImages, centre_box, random_box,
    read_image, write_digits,
)

pytestmark = pytest.mark.usefixtures("one_thread")

COLOURS = {"apple": (200, 30, 40), "leaf": (20, 180, 60), "sky": (40, 90, 220)}


def photo(width, height, seed=0):
    """A smooth picture without symmetry, as a camera would give it."""
    small = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def folder(tmp_path):
    """Three classes of one colour each, in the formats and the modes that occur."""
    for split, n in (("train", 4), ("val", 2)):
        for name, colour in COLOURS.items():
            place = tmp_path / split / name
            place.mkdir(parents=True)
            for i in range(n):
                ending = ("JPEG", "jpg", "png", "JPG")[i]
                Image.new("RGB", (50 + i, 40), colour).save(place / f"{i}.{ending}")
            (place / "notes.txt").write_text("not an image")
    return tmp_path


def test_a_folder_is_read_back(folder):
    for split, n in (("train", 4), ("val", 2)):
        images = ImageFolder(folder, split, 16)
        assert images.classes == ["apple", "leaf", "sky"] and len(images) == 3 * n
        labels = []
        for i in range(len(images)):
            pixels, label = images[0, i]
            assert pixels.shape == (16, 16, 3) and pixels.dtype == torch.uint8
            colour = COLOURS[images.classes[label]]
            assert (pixels.int() - torch.tensor(colour)).abs().max() <= 3  # JPEG is not exact
            labels.append(label)
        assert labels == [0] * n + [1] * n + [2] * n


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGBA", "P", "1", "I;16"])
def test_every_mode_becomes_three_colours(tmp_path, mode):
    path = tmp_path / ("x.jpg" if mode == "CMYK" else "x.png")
    Image.new(mode, (20, 20)).save(path)
    assert read_image(path, 8).shape == (8, 8, 3)


def test_evaluation_resizes_to_256_and_takes_the_centre_224(tmp_path):
    path = tmp_path / "x.png"
    image = photo(500, 375)
    image.save(path)
    resized = image.resize((round(500 * 256 / 375), 256), Image.Resampling.BILINEAR)
    left = (resized.width - 224) // 2
    right = np.asarray(resized.crop((left, 16, left + 224, 240))).astype(int)
    off = np.abs(read_image(path, 224).numpy() - right)
    assert off.mean() < 1.5 and off.max() < 12
    assert centre_box(500, 375) == (85.9375, 23.4375, 414.0625, 351.5625)


@pytest.mark.parametrize("width, height", [(500, 375), (375, 500), (32, 32), (9, 7)])
def test_random_crops_lie_inside_and_keep_their_promises(width, height):
    augment, areas, ratios = Augment(smallest=0.25), [], []
    for seed in range(300):
        left, top, right, bottom = random_box(width, height, augment, random.Random(seed))
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        areas.append((right - left) * (bottom - top) / (width * height))
        ratios.append((right - left) / (bottom - top))
    slack = 2 / min(width, height)  # sides are whole pixels
    assert min(areas) > 0.25 - slack and max(areas) > 0.8
    assert 3 / 4 - slack < min(ratios) < 0.9 < 1.1 < max(ratios) < 4 / 3 + 2 * slack
    assert abs(sum(map(math.log, ratios)) / 300) < 0.15  # as often wide as high


@pytest.mark.parametrize("width, height, box", [
    (1000, 10, (493, 0, 506, 10)), (10, 1000, (0, 493, 10, 506)), (1, 1, (0, 0, 1, 1)),
])
def test_a_very_long_image_gives_its_centre(width, height, box):
    augment = Augment(smallest=1.0)
    assert random_box(width, height, augment, random.Random(0)) == box


def test_half_of_the_images_are_flipped(tmp_path):
    path = tmp_path / "x.png"
    left_dark = Image.new("L", (40, 40), 255)
    left_dark.paste(0, (0, 0, 20, 40))
    left_dark.save(path)
    whole = Augment(smallest=1.0, narrowest=1.0)
    flipped = 0
    for index in range(200):
        pixels = read_image(path, 8, whole, 0, index)[..., 0]
        assert pixels[0, 0] + pixels[0, -1] == 255
        flipped += int(pixels[0, 0] == 255)
    assert 70 < flipped < 130
    still = Augment(smallest=1.0, narrowest=1.0, flip=False)
    assert all(read_image(path, 8, still, 0, i)[0, 0, 0] == 0 for i in range(20))


def test_augmentation_follows_seed_epoch_and_index_alone(tmp_path):
    path = tmp_path / "x.png"
    photo(60, 50).save(path)
    seen = {}
    for seed in range(3):
        for epoch in range(3):
            for index in range(3):
                random.seed(index), torch.manual_seed(epoch), np.random.seed(seed)
                drawn = read_image(path, 16, Augment(seed=seed), epoch, index)
                again = read_image(path, 16, Augment(seed=seed), epoch, index)
                assert torch.equal(drawn, again)
                seen[seed, epoch, index] = drawn.numpy().tobytes()
    assert len(set(seen.values())) == 27


def test_any_number_of_workers_reads_the_same(folder):
    images = ImageFolder(folder, "train", 8, Augment())
    places = [(epoch, i) for epoch in (0, 1) for i in range(len(images))]
    read = [torch.cat([x for x, _ in DataLoader(images, 5, sampler=places, num_workers=n)])
            for n in (0, 1, 2)]
    assert torch.equal(read[0], read[1]) and torch.equal(read[0], read[2])


# --- broken files and folders ---------------------------------------------------------------------

def damaged(folder, how):
    path = folder / "train" / "sky" / "1.jpg"
    photo(64, 64).save(path)
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "text": b"no image"}[how])
    return path


@pytest.mark.parametrize("how", ["empty", "cut", "text"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_file_is_named(folder, how, workers):
    path = damaged(folder, how)
    images = ImageFolder(folder, "train", 8)
    places = [(0, i) for i in range(len(images))]
    with pytest.raises(ValueError, match=f"{path} can't be read as an image: "):
        list(DataLoader(images, 4, sampler=places, num_workers=workers))


def test_a_broken_folder_is_a_sentence(folder):
    with pytest.raises(FileNotFoundError, match="there is no folder .*/test"):
        ImageFolder(folder, "test", 8)
    (folder / "val" / "tree").mkdir()
    with pytest.raises(ValueError, match="val has 4 classes, not the same 3: see tree"):
        ImageFolder(folder, "val", 8, classes=["apple", "leaf", "sky"])
    with pytest.raises(ValueError, match="tree has no images: their names end in .jpeg, .jpg, .pn"):
        ImageFolder(folder, "val", 8)
    (folder / "empty" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match="train has no folders: it needs one for each class"):
        ImageFolder(folder / "empty", "train", 8)


@pytest.mark.parametrize("call, sentence", [
    (lambda: Augment(smallest=0), "smallest=0 must be above 0 and at most 1"),
    (lambda: Augment(narrowest=1.5), "narrowest=1.5 must be above 0 and at most 1"),
    (lambda: SyntheticImages(0, 8, 2), "n=0, size=8 and classes=2 must be at least 1"),
])
def test_bad_input_is_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


# --- what is made up, and the way to floats -----------------------------------------------------

@pytest.mark.parametrize("size", [8, 20, 32])
def test_synthetic_images_are_alike_everywhere_and_differ_from_each_other(size):
    one, other = (SyntheticImages(60, size, 10, seed=3) for _ in range(2))
    drawn = [one[0, i] for i in range(60)]
    for i, (pixels, label) in enumerate(drawn):
        assert pixels.shape == (size, size, 3) and pixels.dtype == torch.uint8
        assert torch.equal(pixels, other[5, i][0]) and label == other[0, i][1] == i % 10
    assert len({pixels.numpy().tobytes() for pixels, _ in drawn}) == 60
    held_out = SyntheticImages(60, size, 10, first=60, seed=3)
    assert not torch.equal(held_out[0, 0][0], one[0, 0][0])


def test_synthetic_images_can_be_learned():
    train, held_out = SyntheticImages(200, 16, 5), SyntheticImages(50, 16, 5, first=200)
    means = torch.stack([torch.stack([train[0, i][0].float() for i in range(label, 200, 5)]).mean(0)
                         for label in range(5)])  # (K, H, W, 3)
    nearest = [(means - held_out[0, i][0]).square().sum((1, 2, 3)).argmin() for i in range(50)]
    assert [int(n) for n in nearest] == [held_out[0, i][1] for i in range(50)]


def test_bytes_become_standardised_floats_without_moving():
    images = torch.randint(0, 256, (2, 5, 4, 3), dtype=torch.uint8)
    x = Normalise()(images)
    right = (images.double() / 255 - torch.tensor(MEAN)) / torch.tensor(DEVIATION)
    torch.testing.assert_close(x, right.permute(0, 3, 1, 2).float())
    assert x.is_contiguous(memory_format=torch.channels_last)


def test_the_digits_are_written_as_a_folder(tmp_path):
    write_digits(tmp_path)
    train = ImageFolder(tmp_path, "train", 32)
    held_out = ImageFolder(tmp_path, "val", 32, classes=train.classes)
    assert (len(train), len(held_out), train.classes) == (1437, 360, [str(d) for d in range(10)])
    pixels, label = train[0, 0]
    assert label == 0 and pixels[16, 16].max() < 80 < 120 < pixels[16, 5:27].max()  # a hole inside
