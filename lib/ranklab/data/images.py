"""Real images with labels: digits on every machine, MNIST and CIFAR-10 from files you have.

    images = digits()                                     # 1,797 real ones, from scikit-learn
    images = find_images("mnist", "where/the/files/are")  # Fashion-MNIST has the same format

Nothing is downloaded. Pixels are standardised by the training images' mean and deviation only.
"""

import gzip
import importlib.util
import math
import pickle
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte",
               "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")  # fmt: skip
CIFAR_FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Images:
    """Images to train on, and held-out images.

    Shape: images (N, C, H, W), float32, standardised; labels (N,), int64.
    """

    name: str
    train: torch.Tensor
    train_labels: torch.Tensor
    held_out: torch.Tensor
    held_out_labels: torch.Tensor
    classes: int


def digits():
    """Read the Images of scikit-learn's 8 x 8 handwritten digits: 1,437 to train on, 360 held out.

    The last fifth is held out, unshuffled: the file is sorted by writer, so most writers of the
    held-out digits are not in the training images.
    """
    # scikit-learn's own file, read without it: its import takes a second, and more on four ranks.
    spec = importlib.util.find_spec("sklearn")
    if spec is None:
        raise ModuleNotFoundError("the digits are a file of scikit-learn, which is not installed",
                                  name="sklearn")
    package = spec.submodule_search_locations[0]
    rows = np.loadtxt(Path(package, "datasets", "data", "digits.csv.gz"), np.uint8, delimiter=",")
    pixels, labels = rows[:, :64].reshape(-1, 1, 8, 8), rows[:, 64]  # 0 to 16; 0 to 9
    cut = len(pixels) * 4 // 5
    return standardised("digits", pixels[:cut], labels[:cut], pixels[cut:], labels[cut:])


def mnist(folder):
    """Read the Images in the four idx files of `folder` (or of its MNIST/raw), plain or .gz.

    Raises: FileNotFoundError, or ValueError if a file is not what its name says.
    """
    train, train_labels, held_out, held_out_labels = (
        read_idx(find_file(folder, ("", "MNIST/raw"), (name, f"{name}.gz")))
        for name in MNIST_FILES
    )
    return standardised("MNIST", train[:, None], train_labels, held_out[:, None], held_out_labels)


def cifar10(folder):
    """Read CIFAR-10's five batches and test batch in `folder`, pickled or binary, as Images.

    Raises: FileNotFoundError, or ValueError if a file is not what its name says.
    """
    batches = []
    for name in CIFAR_FILES:
        path = find_file(folder, ("", "cifar-10-batches-py", "cifar-10-batches-bin"),
                         (name, f"{name}.bin"))  # fmt: skip
        batches.append(read_cifar_binary(path) if path.suffix else read_cifar_pickle(path))
    *train, (held_out, held_out_labels) = batches
    pixels, labels = (np.concatenate(parts) for parts in zip(*train))
    return standardised("CIFAR-10", pixels, labels, held_out, held_out_labels)


def find_images(name, folder=None):
    """Read the Images called `name`: digits, or mnist or cifar10 from `folder`."""
    readers = {"mnist": mnist, "cifar10": cifar10}
    if name == "digits":
        return digits()
    if name not in readers:
        raise ValueError(f"data {name!r} is not one of digits, {', '.join(readers)}")
    if folder is None:
        raise ValueError(f"{name} does not come with this course: name the folder of its files")
    return readers[name](folder)


def find_file(folder, places, names):
    """Find the first file among `names` in one of the `places` below `folder`."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    for place in places:
        for name in names:
            if (path := Path(folder, place, name)).is_file():
                return path
    raise FileNotFoundError(f"{folder} holds no file {' or '.join(names)}")


def read_idx(path):
    """Read an idx file as uint8: two zero bytes, a type, the number of dimensions, sizes, values.

    The file's name tells the number of dimensions: idx1 for labels, idx3 for images.
    """
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path.name} is not a whole gzip file: {error}") from None
    sizes = 1 if "idx1" in path.name else 3
    magic = bytes([0, 0, 0x08, sizes])  # 0x08: unsigned bytes
    if content[:4] != magic:
        raise ValueError(f"{path.name} begins with {content[:4].hex() or 'nothing'}; an idx file "
                         f"of this name begins with {magic.hex()}")  # fmt: skip
    start = 4 + 4 * sizes
    if len(content) < start:
        raise ValueError(f"{path.name} ends within its header, after {len(content)} bytes")
    shape = struct.unpack(f">{sizes}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise ValueError(f"{path.name} holds {len(content) - start} bytes of values; its header "
                         f"says {' x '.join(map(str, shape))}")  # fmt: skip
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_cifar_binary(path):
    """Read (pixels, labels) of a .bin batch: for each image a byte for the label, then pixels."""
    content = np.fromfile(path, np.uint8)
    if not len(content) or len(content) % (1 + CIFAR_PIXELS):
        raise ValueError(f"{path.name} has {len(content)} bytes; each image has {1 + CIFAR_PIXELS}")
    rows = content.reshape(-1, 1 + CIFAR_PIXELS)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def read_cifar_pickle(path):
    """Read (pixels, labels) of a pickled batch: a dict of Python 2, whose keys are bytes."""
    with path.open("rb") as file:
        try:
            batch = ArraysOnly(file, encoding="bytes").load()
            pixels, labels = batch[b"data"], np.asarray(batch[b"labels"], dtype=np.int64)
        except Exception as error:  # a damaged pickle raises nearly anything
            raise ValueError(f"{path.name} is not a whole batch of CIFAR-10 "
                             f"({type(error).__name__}: {error})") from None  # fmt: skip
    if getattr(pixels, "dtype", None) != np.uint8 or pixels.shape[1:] != (CIFAR_PIXELS,):
        raise ValueError(f"{path.name}: its data is not an array of bytes, {CIFAR_PIXELS} a row")
    return pixels.reshape(-1, 3, 32, 32), labels


class ArraysOnly(pickle.Unpickler):
    """Unpickle arrays and plain containers; refuse a pickle that names anything else.

    An ordinary unpickler calls any function that the file names.
    """

    def find_class(self, module, name):
        rebuild = np.empty(0).__reduce__()[0]  # its module's name differs between numpy 1 and 2
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return rebuild
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no array")


def standardised(name, train, train_labels, held_out, held_out_labels, classes=10):
    """Make Images whose channels have mean 0 and deviation 1 over the training images."""
    for pixels, labels in ((train, train_labels), (held_out, held_out_labels)):
        if len(pixels) != len(labels) or not len(pixels):
            raise ValueError(f"{name}: {len(pixels)} images and {len(labels)} labels")
        if labels.min() < 0 or labels.max() >= classes:
            raise ValueError(f"{name}: labels go from {labels.min()} to {labels.max()}; "
                             f"{classes} classes are 0 to {classes - 1}")  # fmt: skip
    if train.shape[1:] != held_out.shape[1:]:
        raise ValueError(f"{name}: images of {train.shape[1:]} and held out {held_out.shape[1:]}")
    over = {"axis": (0, 2, 3), "keepdims": True, "dtype": np.float64}
    mean = train.mean(**over)
    squares = np.square(train, dtype=np.uint16)  # exact, and a quarter of the memory of std()
    deviation = np.sqrt(squares.mean(**over) - mean**2)
    deviation[deviation == 0] = 1
    mean, deviation = mean.astype(np.float32), deviation.astype(np.float32)
    images = [torch.from_numpy((pixels - mean) / deviation) for pixels in (train, held_out)]
    labels = [torch.from_numpy(each.astype(np.int64)) for each in (train_labels, held_out_labels)]
    return Images(name, images[0], labels[0], images[1], labels[1], classes)
