"""Loaders of images, on small files written here in the true formats."""

import gzip
import pickle
import pickletools
import struct

import numpy as np
import pytest
import torch

from ranklab import data
from ranklab.data import images

RNG_SEED = 0
PIXELS = 3 * 32 * 32


def write_idx(folder, sizes=(30, 20), suffix=""):
    """Four idx files as the MNIST page describes them; returns their arrays."""
    rng, written = np.random.default_rng(RNG_SEED), []
    for name, n in zip(images.MNIST_FILES, (sizes[0], sizes[0], sizes[1], sizes[1])):
        array = (rng.integers(0, 256, (n, 28, 28)) if "images" in name else np.arange(n) % 10)
        array = array.astype(np.uint8)
        magic = 0x801 if array.ndim == 1 else 0x803
        content = struct.pack(f">I{array.ndim}I", magic, *array.shape) + array.tobytes()
        (folder / (name + suffix)).write_bytes(gzip.compress(content) if suffix else content)
        written.append(array)
    return written


def python_2_pickle(pixels, labels):
    """The bytes that Python 2 wrote: protocol 2, keys and pixels as its `str`."""
    def string(content):
        return b"T" + struct.pack("<i", len(content)) + content

    array = (b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + string(b"b")
             + b"\x87R(K\x01" + b"J" + struct.pack("<i", len(pixels)) + b"M"
             + struct.pack("<H", PIXELS) + b"\x86cnumpy\ndtype\n" + string(b"u1")
             + b"K\x00K\x01\x87R(K\x03" + string(b"|")
             + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89" + string(pixels.tobytes())
             + b"tb")  # fmt: skip
    label_list = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return (b"\x80\x02}(" + string(b"data") + array + string(b"labels") + label_list
            + string(b"batch_label") + string(b"a test") + b"u.")  # fmt: skip


def write_cifar(folder, kind, n=4):
    """The six batches, pickled or binary; returns {name: (pixels (n, 3072), labels)}."""
    rng, written = np.random.default_rng(RNG_SEED), {}
    folder.mkdir(parents=True, exist_ok=True)
    for name in images.CIFAR_FILES:
        pixels = rng.integers(0, 256, (n, PIXELS)).astype(np.uint8)
        labels = rng.integers(0, 10, n).astype(np.uint8)
        if kind == "binary":
            (folder / f"{name}.bin").write_bytes(np.c_[labels, pixels].tobytes())
        else:
            (folder / name).write_bytes(python_2_pickle(pixels, labels))
        written[name] = pixels, labels
    return written


# --- digits ---------------------------------------------------------------------------------------

def test_digits_are_real_standardised_and_always_the_same():
    from sklearn.datasets import load_digits

    digits, again = data.digits(), data.find_images("digits")
    labels = torch.cat([digits.train_labels, digits.held_out_labels])
    assert labels.tolist() == load_digits().target.tolist()
    pixels = torch.cat([digits.train, digits.held_out]).flatten(1).double()
    assert np.corrcoef(pixels.flatten(), load_digits().data.flatten())[0, 1] > 1 - 1e-9
    assert digits.train.shape == (1437, 1, 8, 8) and digits.held_out.shape == (360, 1, 8, 8)
    assert digits.train.dtype == torch.float32 and digits.train_labels.dtype == torch.int64
    assert abs(digits.train.mean()) < 1e-5 and abs(digits.train.std() - 1) < 1e-3
    assert torch.bincount(digits.held_out_labels, minlength=10).min() >= 30  # every class is there
    assert torch.equal(digits.train, again.train) and torch.equal(digits.held_out, again.held_out)
    theirs = load_digits()  # digits() reads its file only
    assert torch.cat([digits.train_labels, digits.held_out_labels]).tolist() == [*theirs.target]
    pixels = torch.from_numpy(theirs.images).float()
    mine = torch.cat([digits.train, digits.held_out])[:, 0] * pixels[:1437].std(correction=0)
    torch.testing.assert_close(mine + pixels[:1437].mean(), pixels, rtol=1e-5, atol=1e-5)


# --- MNIST ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("suffix, below", [("", ""), (".gz", ""), ("", "MNIST/raw")])
def test_mnist_is_read_plain_and_zipped(tmp_path, suffix, below):
    folder = tmp_path / below
    folder.mkdir(parents=True, exist_ok=True)
    pixels, labels, held_out, held_out_labels = write_idx(folder, suffix=suffix)
    found = data.find_images("mnist", tmp_path)
    assert found.train.shape == (30, 1, 28, 28) and found.held_out.shape == (20, 1, 28, 28)
    assert found.train_labels.tolist() == labels.tolist()
    assert found.held_out_labels.tolist() == held_out_labels.tolist()
    for ours, bytes_ in ((found.train, pixels), (found.held_out, held_out)):
        wanted = (bytes_.astype(np.float64) - pixels.mean()) / pixels.std()
        np.testing.assert_allclose(ours[:, 0].numpy(), wanted, atol=1e-5)


@pytest.mark.parametrize("change, sentence", [
    (lambda b: b[:2] + b"\x0d" + b[3:], "begins with 00000d03; an idx .* with 00000803"),
    (lambda b: b"", "begins with nothing"),
    (lambda b: b[:10], "ends within its header, after 10 bytes"),
    (lambda b: b[:-5], "holds 23515 bytes of values; its header says 30 x 28 x 28"),
    (lambda b: b + b"!", "holds 23521 bytes of values"),
])  # fmt: skip
def test_a_damaged_idx_file_is_refused(tmp_path, change, sentence):
    write_idx(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f"train-images-idx3-ubyte {sentence}"):
        data.mnist(tmp_path)


@pytest.mark.parametrize("change", [lambda b: b[:-20], lambda b: b[:30] + b"\0" + b[31:],
                                    lambda b: b"plain"])
def test_a_damaged_gz_file_is_refused(tmp_path, change):
    write_idx(tmp_path, suffix=".gz")
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match="t10k-images-idx3-ubyte.gz is not a whole gzip file"):
        data.mnist(tmp_path)


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    write_idx(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.write_bytes(struct.pack(">2I", 0x801, 29) + bytes(29))
    with pytest.raises(ValueError, match="MNIST: 30 images and 29 labels"):
        data.mnist(tmp_path)
    labels.write_bytes(struct.pack(">2I", 0x801, 30) + bytes([11] * 30))
    with pytest.raises(ValueError, match="labels go from 11 to 11; 10 classes are 0 to 9"):
        data.mnist(tmp_path)


# --- CIFAR-10 -------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind, below", [("pickle", "cifar-10-batches-py"), ("pickle", ""),
                                         ("binary", "cifar-10-batches-bin"), ("binary", "")])
def test_cifar_is_read_pickled_and_binary(tmp_path, kind, below):
    batches = write_cifar(tmp_path / below, kind)
    found = data.find_images("cifar10", tmp_path)
    assert found.train.shape == (20, 3, 32, 32) and found.held_out.shape == (4, 3, 32, 32)
    assert found.held_out_labels.tolist() == batches["test_batch"][1].tolist()
    labels = [label for name in images.CIFAR_FILES[:5] for label in batches[name][1].tolist()]
    assert found.train_labels.tolist() == labels
    first = torch.from_numpy(batches["data_batch_1"][0][0].reshape(3, 32, 32).astype(np.float32))
    for channel in range(3):  # red, green, blue planes; standardised each by itself
        ours, theirs = found.train[0, channel], first[channel]
        torch.testing.assert_close((ours - ours.mean()) / ours.std(),
                                   (theirs - theirs.mean()) / theirs.std(), atol=1e-4, rtol=0)
        assert abs(found.train[:, channel].mean()) < 1e-5
        assert abs(found.train[:, channel].std(correction=0) - 1) < 1e-4


def test_our_test_file_is_what_python_2_wrote():
    """Only opcodes of protocol 2, and text as Python 2's strings: the originals hold no others."""
    content = python_2_pickle(np.zeros((2, PIXELS), np.uint8), np.array([1, 2], np.uint8))
    codes = {code.name for code, _, _ in pickletools.genops(content)}
    assert all(code.proto <= 2 for code, _, _ in pickletools.genops(content))
    assert "BINSTRING" in codes and not {"BINUNICODE", "BINBYTES"} & codes


class Evil:
    def __reduce__(self):
        return (open, ("ran.txt", "w"))


@pytest.mark.parametrize("content, sentence", [
    (pickle.dumps({b"data": Evil()}, 3), r"it names (io|_io|__builtin__)\.open, which is no array"),
    (pickle.dumps({b"data": np.zeros((1, 5), np.uint8).tolist(), b"labels": [1]}, 3),
     "its data is not an array of bytes, 3072 a row"),
    (pickle.dumps({"data": 1}, 2), r"\(KeyError: b'data'\)"),
    (python_2_pickle(np.zeros((2, PIXELS), np.uint8), b"\1\2")[:500], "pickle data was trunc"),
    (b"", r"is not a whole batch of CIFAR-10 \(EOFError"),
], ids=["calls a function", "no array", "no bytes keys", "truncated", "empty"])  # fmt: skip
def test_a_wrong_pickle_is_refused_and_never_run(tmp_path, monkeypatch, content, sentence):
    monkeypatch.chdir(tmp_path)
    write_cifar(tmp_path, "pickle")
    (tmp_path / "data_batch_2").write_bytes(content)
    with pytest.raises(ValueError, match=f"data_batch_2.*{sentence}"):
        data.cifar10(tmp_path)
    assert not (tmp_path / "ran.txt").exists()


def test_a_truncated_binary_batch_is_refused(tmp_path):
    write_cifar(tmp_path, "binary")
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="data_batch_3.bin has 12291 bytes; each image has 3073"):
        data.cifar10(tmp_path)


# --- what is missing ------------------------------------------------------------------------------

def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder .*nowhere"):
        data.mnist(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no file train-images-idx3-ubyte or .*ubyte.gz"):
        data.mnist(tmp_path)
    write_cifar(tmp_path, "pickle")
    (tmp_path / "test_batch").unlink()
    with pytest.raises(FileNotFoundError, match="holds no file test_batch or test_batch.bin"):
        data.cifar10(tmp_path)


def test_an_unknown_name_and_a_missing_folder_get_a_sentence():
    with pytest.raises(ValueError, match="data 'imagenet' is not one of digits, mnist, cifar10"):
        data.find_images("imagenet")
    with pytest.raises(ValueError, match="cifar10 does not come with this course"):
        data.find_images("cifar10")
