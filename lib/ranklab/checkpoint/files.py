"""The folders of checkpoints: make, write, list, read and delete them."""

import hashlib
import json
import os
import re
import shutil

import torch

from ranklab.baseline.checkpointing import random_state
from ranklab.basics.files import whole_file

INDEX = "index.json"


def saves(folder):
    """Return {number of the save: its folder}, in order, including incomplete ones."""
    paths = ((re.fullmatch(r"step-\d+-save-(\d+)", path.name), path) for path in folder.glob("*"))
    return dict(sorted((int(name[1]), path) for name, path in paths if name))


def complete(folder):
    """List the folders of all complete checkpoints, oldest first."""
    return [path for path in saves(folder).values() if (path / INDEX).exists()]


def new_folder(folder, step):
    """Make a folder inside `folder` that no other job uses; return its path."""
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file, but a checkpoint is a folder")
    folder.mkdir(parents=True, exist_ok=True)
    number = max(saves(folder), default=0) + 1
    while True:
        try:
            place = folder / f"step-{step:06}-save-{number}"
            place.mkdir()
            return place
        except FileExistsError:  # another job has just made it
            number += 1


def forget(folder, keep):
    """Delete all but the last `keep` checkpoints; leave newer folders, which may be in use."""
    newest = complete(folder)[-keep:]
    for path in saves(folder).values():
        if path in newest:
            break
        (path / INDEX).unlink(missing_ok=True)  # first: a half-deleted one must not look complete
        shutil.rmtree(path, ignore_errors=True)


def rank_file(rank):
    return f"rank-{rank:05}.pt"


def write_rank(place, rank, tensors, own):
    """Write the rank's file to the disk; return its size and checksum."""
    # copies: a view would be saved with its whole storage
    copies = {key: torch.empty(t.shape, dtype=t.dtype).copy_(t) for key, t in tensors.items()}
    path = place / rank_file(rank)
    with open(path, "wb") as file:
        try:
            torch.save({"boxes": copies, "random": random_state(), "own": own}, file)
        except RuntimeError as error:  # "unexpected pos 3520 vs 3472" if the disk is full
            raise error.__context__ or error from None
        sync(file)
    return fingerprint(path)


def fingerprint(path):
    with open(path, "rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def checksum_of(index):
    """Return the checksum of the index's content, not of its layout.

    Writing the index as JSON and reading it back changes nothing.
    """
    return hashlib.sha256(json.dumps(index).encode()).hexdigest()


def write_index(place, index):
    """Make `place` a checkpoint by renaming its index, once all its files are on the disk."""
    with whole_file(place / INDEX) as part, open(part, "w") as file:
        json.dump({**index, "checksum": checksum_of(index)}, file)
        sync(file)
    for folder in (place, place.parent):  # sync the names as well
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def sync(file):
    file.flush()
    os.fsync(file.fileno())


class Files:
    """A checkpoint to read from; every file is checked against its checksum before it is used.

    An index without a checksum is refused: it may be damaged, or from an older ranklab.
    """

    def __init__(self, place):
        self.place, self.opened = place, {}
        try:
            self.index = json.loads((place / INDEX).read_text())
        except ValueError:
            raise self.damage(f"{INDEX} is not whole") from None
        if not isinstance(self.index, dict) or "checksum" not in self.index:
            raise self.damage(f"{INDEX} has no checksum (an older ranklab wrote none)")
        if self.index.pop("checksum") != checksum_of(self.index):
            raise self.damage(f"{INDEX} has another checksum than was written")

    def damage(self, reason):
        return ValueError(f"the checkpoint {self.place} is damaged: {reason}. Move it away to go "
                          "on from the one before it")

    def open(self, rank):
        """Return the content of the rank's file; tensors stay on the disk until they are read."""
        if rank not in self.opened:
            path, (size, checksum) = self.place / rank_file(rank), self.index["files"][rank]
            if not path.exists():
                raise self.damage(f"{path.name} is missing")
            disk_size, disk_checksum = fingerprint(path)
            if (disk_size, disk_checksum) != (size, checksum):
                raise self.damage(f"{path.name} has {disk_size:,} bytes of checksum "
                                  f"{disk_checksum[:8]}, but {size:,} of checksum {checksum[:8]} "
                                  "were written")
            self.opened[rank] = torch.load(path, map_location="cpu", mmap=True)
        return self.opened[rank]

    def overlapping(self, piece):
        """Return [(offset, tensor)] of the stored boxes that overlap the piece.

        Raises: ValueError if the checkpoint's tensor has a different shape, or a file is damaged.
        """
        saved, boxes = self.index["state"][piece.name][piece.kind], []
        if tuple(saved["shape"]) != tuple(piece.shape):
            raise ValueError(f"{piece.name} ({piece.kind}) is {tuple(saved['shape'])} in the "
                             f"checkpoint, here {tuple(piece.shape)}")
        for rank, offset, sizes in saved["boxes"]:
            if all(a < b + m and b < a + n for a, n, b, m in
                   zip(piece.offset, piece.tensor.shape, offset, sizes)):  # fmt: skip
                key = box_key(piece.name, piece.kind, offset, sizes)
                boxes.append((offset, self.open(rank)["boxes"][key]))
        return boxes


def box_key(name, kind, offset, sizes):
    """Return the name of a box in a rank's file."""
    return f"{name} {kind} {list(offset)} {list(sizes)}"
