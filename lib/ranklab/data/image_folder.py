"""Images from folders in ImageNet's layout, or made up; both as bytes, a quarter of the size of
floats: a worker reads bytes, and the training device turns them into floats.

    folder/train/<class>/*.JPEG     also .jpg and .png; classes are numbered in sorted order
    folder/val/<class>/*.JPEG

    images = ImageFolder(folder, "train", 224, augment=Augment())
    pixels, label = images[3, 17]             # image 17 as epoch 3 sees it: (H, W, 3), uint8
    x = Normalise(device)(pixels[None])       # (1, 3, H, W), float32

Random crops and flips depend only on the image's (seed, epoch, index). So no two images and no two
epochs share them, and they are the same for any number of ranks and of workers, and after a restart
in the middle of an epoch. (A generator per worker would have to be seeded with seed, epoch, rank
and worker; if one of them is forgotten, some ranks train on the same crops.)
"""

import math
import os
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

ENDINGS = (".jpeg", ".jpg", ".png")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, red green blue
KEPT = 224 / 256  # part of the shorter side that the centre crop keeps
TRIES = 10  # for a crop that fits
PATTERN = 8  # tiles along each side of a made-up image


@dataclass(frozen=True)
class Augment:
    """How much a training image may change; the defaults are ImageNet's usual ones.

    Paper: Szegedy et al. 2014, Going Deeper with Convolutions
    """

    smallest: float = 0.08  # part of the image's area
    narrowest: float = 3 / 4  # width per height; the widest is 1 / narrowest
    flip: bool = True
    seed: int = 0

    def __post_init__(self):
        for name in ("smallest", "narrowest"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0 and at most 1")


class ImageFolder(Dataset):
    """The images of one split of a folder; `images[epoch, index]` is (bytes (H, W, 3), label).

    size: H = W
    augment: random crops and flips; None: the centre crop, the same in every epoch
    classes: the class names in the order of their labels; None: the folder names, sorted
    """

    def __init__(self, folder, split, size, augment=None, classes=None):
        self.root, self.size, self.augment = Path(folder, split), size, augment
        folders = class_folders(self.root)
        self.classes = classes or folders
        if self.classes != folders:
            odd = sorted(set(folders) ^ set(self.classes))
            raise ValueError(f"{self.root} has {len(folders)} classes, not the same "
                             f"{len(self.classes)}: see {', '.join(odd[:3])}")  # fmt: skip
        names, labels = [], []
        for label, name in enumerate(self.classes):
            files = image_files(self.root / name)
            names += [os.fsencode(f"{name}/{file}") for file in files]
            labels += [label] * len(files)
        # One block of memory, not a million objects: these would be copied into every worker as
        # soon as it changes their reference counts.
        self.names, self.labels = np.array(names), np.array(labels)

    def __len__(self):
        return len(self.names)

    def __getitem__(self, place):
        epoch, index = place
        path = self.root / os.fsdecode(self.names[index])
        pixels = read_image(path, self.size, self.augment, epoch, index)
        return pixels, int(self.labels[index])


def class_folders(root):
    """List the names of the folders in `root`, sorted."""
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}")
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    if not names:
        raise ValueError(f"{root} has no folders: it needs one for each class")
    return names


def image_files(folder):
    """List the names of the images in `folder`, sorted.

    Raises: ValueError if there are none.
    """
    names = sorted(entry.name for entry in os.scandir(folder)
                   if entry.name.lower().endswith(ENDINGS))  # fmt: skip
    if not names:
        raise ValueError(f"{folder} has no images: their names end in {', '.join(ENDINGS)}")
    return names


def read_image(path, size, augment=None, epoch=0, index=0):
    """Read the image at `path`, cropped and resized: (H, W, 3), uint8, H = W = size."""
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")  # grey, CMYK and transparent ones as well
    except Exception as error:  # a damaged file raises nearly anything
        raise ValueError(f"{path} can't be read as an image: {error}") from None
    flip = False
    if augment is None:
        box = centre_box(*image.size)
    else:
        numbers = random.Random(f"{augment.seed} {epoch} {index}")  # hashed: no two are related
        box = random_box(*image.size, augment, numbers)
        flip = augment.flip and numbers.random() < 0.5
    image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image))


def centre_box(width, height):
    """Return (left, top, right, bottom) of the square for evaluation, 7/8 of the shorter side.

    In one step, it does the same as resizing to 256 and cropping 224 from the centre.
    """
    side = KEPT * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width, height, augment, numbers):
    """Return (left, top, right, bottom) of a random part; `numbers` is a random.Random."""
    widest = -math.log(augment.narrowest)
    for _ in range(TRIES):
        area = width * height * numbers.uniform(augment.smallest, 1)
        ratio = math.exp(numbers.uniform(-widest, widest))  # wide as often as high
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = numbers.randint(0, width - w), numbers.randint(0, height - h)
            return left, top, left + w, top + h
    # a very long image: its whole shorter side, from the centre
    w = min(width, round(height / augment.narrowest))
    h = min(height, round(width / augment.narrowest))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


class SyntheticImages(Dataset):
    """Made-up images that can be learned: each class has its own pattern, under noise.

    `images[epoch, index]` depends only on the index, so all ranks agree. It is cheap on purpose, a
    third of a millisecond at 224, so that the time goes into training and not into the loader.
    first: the number of its first image; a held-out set begins where the training set ends
    """

    def __init__(self, n, size, classes, first=0, seed=0):
        if min(n, size, classes) < 1:
            raise ValueError(f"n={n}, size={size} and classes={classes} must be at least 1")
        self.n, self.size, self.first = n, size, first
        self.classes = [str(label) for label in range(classes)]
        numbers = torch.Generator().manual_seed(seed)

        def random_bytes(*shape):
            return torch.randint(0, 128, shape, dtype=torch.uint8, generator=numbers)

        self.patterns = random_bytes(classes, PATTERN, PATTERN * 3)
        self.noise = random_bytes(2 * size, 2 * size, 3)  # each image lies somewhere else in it
        self.tile = torch.arange(size) * PATTERN // size  # which one a row or a column belongs to
        self.colours = (3 * self.tile[:, None] + torch.arange(3)).flatten()  # the same in a row

    def __len__(self):
        return self.n

    def __getitem__(self, place):
        _, index = place
        number = self.first + index
        label = number % len(self.classes)
        top, left = divmod(number * 7919, self.size)  # a prime: neighbours lie far apart
        top %= self.size
        noise = self.noise[top : top + self.size, left : left + self.size]
        pattern = self.patterns[label].index_select(1, self.colours).index_select(0, self.tile)
        return pattern.view(self.size, self.size, 3) + noise, label


def write_digits(folder, size=32):
    """Write scikit-learn's 1,797 handwritten digits to `folder`, as JPEGs in ImageNet's layout.

    So every machine has real files to train on. The last fifth, by other writers, is held out.
    """
    from sklearn.datasets import load_digits  # half a second, and only here

    bunch = load_digits()
    for number, (pixels, label) in enumerate(zip(bunch.images, bunch.target)):
        split = "train" if number < len(bunch.images) * 4 // 5 else "val"
        path = Path(folder, split, str(label), f"{number:04}.jpg")
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels * 255 / 16).astype(np.uint8))
        image.resize((size, size), Image.Resampling.BICUBIC).save(path, quality=90)
    return folder


class Normalise:
    """Turn bytes (B, H, W, 3) into floats (B, 3, H, W).

    Each colour then has mean 0 and standard deviation 1 over ImageNet. The memory layout does not
    change; torch calls it channels_last.
    """

    def __init__(self, device="cpu"):
        self.mean, self.deviation = (
            255 * torch.tensor(values, device=device).view(1, 3, 1, 1)
            for values in (MEAN, DEVIATION)
        )  # fmt: skip

    def __call__(self, images):
        return images.permute(0, 3, 1, 2).float().sub_(self.mean).div_(self.deviation)
