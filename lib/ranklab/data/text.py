"""Real text on every machine, without a download: the source of Python's own standard library.

A token is a byte (V = 256), so there is no tokenizer to train or load. Whole files are held out,
never lines of a file whose other lines are trained on. A batch depends only on (seed, step): a
resumed run sees the batches that it would have seen, and the order is the same for any number of
ranks.
"""

import hashlib
import os
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

END = b"\0"  # between two files
# Tests and generated tables repeat themselves, and would put the same lines on both sides.
SKIPPED = {"test", "tests", "idle_test", "encodings", "lib2to3", "idlelib", "turtledemo",
           "ensurepip", "site-packages", "dist-packages", "__pycache__"}  # fmt: skip
ENOUGH = 1_000_000  # bytes


@dataclass(frozen=True)
class Text:
    """Tokens to train on, and held-out tokens, as arrays of integers."""

    name: str
    train: np.ndarray
    held_out: np.ndarray
    vocab_size: int


def python_text():
    """Read the source of this Python's library as a Text: about 8 MB to train on, 1 MB held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out = [], []
    for path, content in library_files(root):
        # the hash of its name puts a file on the same side on every machine, in every version
        (held_out if zlib.crc32(path.encode()) % 10 == 0 else train).append(content)
    size = sum(map(len, train))
    if size < ENOUGH or not held_out:
        raise ValueError(
            f"this Python holds {size} bytes of its own source in {root}, {ENOUGH} are needed: "
            "give a text file of your own with text_file(path), or --data PATH"
        )
    return Text("the source of Python's library", joined(train), joined(held_out), 256)


def library_files(root):
    """List (relative path, bytes) of the Python files under `root`, sorted, without duplicates."""
    files, digests = [], set()
    for folder, below, names in os.walk(root):
        below[:] = sorted(b for b in below if b not in SKIPPED and not b.startswith("config-"))
        for name in sorted(names):
            path = Path(folder, name)
            content = path.read_bytes() if name.endswith(".py") else b""
            digest = hashlib.sha256(content).digest()
            if content and digest not in digests:
                digests.add(digest)
                files.append((path.relative_to(root).as_posix(), content))
    return files


def joined(contents):
    return np.frombuffer(END.join(contents), dtype=np.uint8)


def text_file(path, held_out=0.1):
    """Read your file as a Text; hold out its last tenth.

    A file whose name ends in .bin holds tokens as uint16 (nanoGPT's format); any other is bytes.
    """
    path = Path(path)
    if path.stat().st_size < 2:
        raise ValueError(f"{path} is empty")
    is_tokens = path.suffix == ".bin"
    kind = np.uint16 if is_tokens else np.uint8
    tokens = np.memmap(path, kind, "r", shape=path.stat().st_size // kind().itemsize)
    cut = int(len(tokens) * (1 - held_out))
    vocab_size = int(tokens.max()) + 1 if is_tokens else 256
    return Text(path.name, tokens[:cut], tokens[cut:], vocab_size)


def batch_at(tokens, step, batch, n_ctx, seed=0):
    """Cut the batch of step `step` at random places; targets are one token ahead.

    Returns: (inputs, targets), each (B, T), int64, on the CPU.
    """
    check_length(tokens, n_ctx)
    generator = np.random.default_rng((seed, step))  # stateless: step 1000 needs no 999 before it
    start = generator.integers(0, len(tokens) - n_ctx, size=batch)
    return windows(tokens, start, n_ctx)


def held_out_batch(tokens, batch, n_ctx):
    """Cut `batch` windows, spread evenly over `tokens`; they are always the same.

    Returns: (inputs, targets), each (B, T), int64, on the CPU.
    """
    check_length(tokens, n_ctx)
    most = (len(tokens) - 1) // n_ctx  # windows that do not overlap
    if batch > most:
        raise ValueError(f"{batch} windows of {n_ctx} do not fit {len(tokens)} held-out tokens")
    start = np.arange(batch) * (most // batch) * n_ctx
    return windows(tokens, start, n_ctx)


def windows(tokens, start, n_ctx):
    cut = tokens[start[:, None] + np.arange(n_ctx + 1)].astype(np.int64)  # (B, T + 1)
    return torch.from_numpy(cut[:, :-1].copy()), torch.from_numpy(cut[:, 1:].copy())


def check_length(tokens, n_ctx):
    if len(tokens) <= n_ctx:
        raise ValueError(f"{len(tokens)} tokens are too few for a window of n_ctx={n_ctx} and one")


def bigram_loss(train, inputs, targets, vocab_size=256):
    """Return the loss, in nats per token, of a model that knows only the previous token.

    A GPT must beat it. It counts pairs in the first 50 million tokens of `train`, with add-one
    smoothing.
    """
    train = train[:50_000_000].astype(np.int64)
    inputs, targets = inputs.numpy().ravel(), targets.numpy().ravel()
    # only pairs that occur in the batch are counted, because a table of all pairs is V x V
    batch_pairs, place = np.unique(inputs * vocab_size + targets, return_inverse=True)
    train_pairs = train[:-1] * vocab_size + train[1:]
    nearest = np.searchsorted(batch_pairs, train_pairs).clip(max=len(batch_pairs) - 1)
    matches = nearest[batch_pairs[nearest] == train_pairs]
    counts = np.bincount(matches, minlength=len(batch_pairs))[place]
    input_counts = np.bincount(train[:-1], minlength=vocab_size)[inputs]
    return float(-np.log((counts + 1) / (input_counts + vocab_size)).mean())


def decode(tokens):
    """Return the text of byte tokens; an invalid byte becomes a replacement mark."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")
