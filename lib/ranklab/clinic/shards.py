"""Files of a data store, with their checksums; one was damaged after it was written."""

import hashlib
from typing import NamedTuple

import torch

from ranklab.data.images import digits
from ranklab.engine import device

LOG = b"GET /shards/21 404 NOT FOUND RETRY IN 5 SECONDS\nGET /shards/21"
SIZE = 32  # images in a file


class Shard(NamedTuple):
    """A file of a data store: float16 images, then one byte for each label; with its checksum."""

    content: bytes
    sha256: str

    def batch(self):
        """Return (images, labels), on this rank's device."""
        y = torch.frombuffer(bytearray(self.content[-SIZE:]), dtype=torch.uint8)
        x = torch.frombuffer(bytearray(self.content[:-SIZE]), dtype=torch.float16)
        return x.view(SIZE, 64).float().to(device()), y.long().to(device())


def stored_shards(damage=((21, 1024, LOG),)):
    """Return the Shards of the handwritten digits, as read from the store.

    damage  [(number of the shard, offset, new bytes)]: done after the checksum was computed
    """
    images = digits()
    parts = zip(images.train.flatten(1).half().split(SIZE), images.train_labels.byte().split(SIZE))
    files = [x.numpy().tobytes() + y.numpy().tobytes() for x, y in parts if len(y) == SIZE]
    sums = [hashlib.sha256(content).hexdigest() for content in files]
    for number, at, noise in damage:
        content = bytearray(files[number])
        content[at:at + len(noise)] = noise
        files[number] = bytes(content)
    return [*map(Shard, files, sums)]
