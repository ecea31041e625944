"""The response cache: a name that was negotiated once costs one bit from then on.

Training asks for the same names, shapes and types in every step. So every rank remembers each
response in a numbered slot, the same slot on every rank, and from the second step on says "slot 7
is ready here" instead of sending name, shape and type to the coordinator.
"""

from collections import OrderedDict

import numpy as np
import torch


class ResponseCache:
    """Responses in numbered slots; the least recently used one makes room.

    All ranks put, use and evict in the same order, so their slots agree without a message.
    """

    def __init__(self, capacity):
        self.capacity = capacity
        self.slots = []  # slot -> name, or None
        self.entries = OrderedDict()  # name -> (slot, this rank's request, response); oldest first

    def slot(self, request):
        """The slot that answers `request`; None when it is not known, or was another shape."""
        slot, known, _ = self.entries.get(request.name, (None, None, None))
        return slot if known == request else None

    def put(self, request, response):
        """`response` is remembered as the answer to `request`."""
        if self.capacity == 0:
            return
        self.evict(request.name)
        if len(self.entries) == self.capacity:
            self.evict(next(iter(self.entries)))
        if None not in self.slots:
            self.slots.append(None)
        slot = self.slots.index(None)
        self.slots[slot] = request.name
        self.entries[request.name] = (slot, request, response)

    def use(self, slot):
        """The response in `slot`, which is now the most recently used."""
        name = self.slots[slot]
        self.entries.move_to_end(name)
        return self.entries[name][2]

    def outdated(self, requests):
        """Names that must go when the coordinator hears `requests`.

        These are known names that a rank sends again. With a join they are also all requests that a
        joined rank can't take part in: they would wait for its bit.
        """
        has_join = any(request.kind == "join" for request in requests)
        return [request.name for request in requests if request.name in self.entries] + [
            name for name, (_, _, response) in self.entries.items()
            if has_join and response.request.kind != "allreduce"]

    def evict(self, name):
        """Nothing is known of `name` any more."""
        if name in self.entries:
            slot, _, _ = self.entries.pop(name)
            self.slots[slot] = None


def to_bits(ready, n):
    """The numbers in `ready`, all below `n`, as a tensor of n bits, 8 in a byte."""
    flags = np.zeros(n, dtype=np.uint8)
    flags[list(ready)] = 1
    return torch.from_numpy(np.packbits(flags))


def from_bits(bits, n):
    """The numbers whose bit is set, in order."""
    return np.flatnonzero(np.unpackbits(bits.numpy(), count=n)).tolist()
