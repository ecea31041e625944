"""MemoryCurve: the bytes alive on a rank after every op of a block, by category, and their peak."""

import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ranklab.meter.memory import Memory, held_bytes
from ranklab.meter.storage import storages_of, tensors_in
from ranklab.meter.watcher import Watcher


class MemoryCurve:
    """Note this rank's memory after every tensor op of the block: forward, backward, step.

        with MemoryCurve(model, optimizer) as curve:
            model(x).sum().backward()
            curve.mark("step")
            optimizer.step()
        curve.peak_bytes; print(curve.peak)

    Tensors of the model, the optimizer, `gathered` and `communication` count as in memory_of. The
    last two are looked up again at every op, so pass a list that your code changes, or a function
    that returns one. All other tensors, including temporaries and the batch, count as activations,
    from the op that makes them until nothing holds them. Tensors older than the block count from
    the first op that uses them.
    A storage counts once, whole, with its size at that moment.

    The peak is exact for tensors that are alive when an op returns. Not seen: memory that an op
    allocates and frees inside (cuDNN's workspace, temporaries of compiled code); a DDP bucket
    before its first use; what the allocator rounds up or keeps. Memory of all devices is added up.
    If the same object is entered again, its curve continues.
    Cost: nothing is sent; each op looks at all held tensors: 1 ms with 100 parameters under Adam
    """

    def __init__(self, model, optimizer=None, gathered=(), communication=(), shards=()):
        self.points = []  # Memory: at the start of the block, after each op, at marks, at the end
        self.marks = []  # (index into points, name)
        self._lookup = model, optimizer, gathered, communication
        self._shards = list(shards)
        self._references = {}  # identity of a storage -> weak reference, which keeps it from reuse
        self._parameters = []  # weak references to the parameters at the start of the block
        self._mode = None

    def __enter__(self):
        self._parameters = [weakref.ref(p) for p in self._lookup[0].parameters()]
        self._note()
        self._mode = Watcher(self, self._after_op)
        self._mode.__enter__()
        return self

    def __exit__(self, *error):
        self._mode.__exit__(*error)
        self._mode = None
        self._note()

    def __getstate__(self):
        """Pickle the numbers only; the model and its tensors stay in this process."""
        return {"points": self.points, "marks": self.marks}

    def mark(self, name):
        """Name the part of the block that begins here, and add a point to the curve."""
        self._note()
        self.marks.append((len(self.points) - 1, name))

    @property
    def peak(self):
        """The Memory with the largest total; the first one in case of a tie."""
        return max(self.points, key=lambda memory: memory.total)

    @property
    def peak_bytes(self):
        return self.peak.total

    def _after_op(self, func, args, kwargs, result):
        self._see(args, kwargs, result)
        self._note()

    def _see(self, *values):
        """Count, from now on, the storages of all tensors in an op's values; return them."""
        storages = [storage for tensor in tensors_in(values) for storage in storages_of(tensor)]
        for storage in storages:
            if storage._cdata not in self._references:
                self._references[storage._cdata] = StorageWeakRef(storage)
        return storages

    def _note(self):
        """Add a point to the curve."""
        counted, (model, optimizer, *extra) = set(), self._lookup
        # A model under FSDP2 shows its shards, and at times the whole weights instead.
        parameters = [p for ref in self._parameters if (p := ref()) is not None]
        parameters += [*model.parameters(), *self._shards]
        sizes = held_bytes(parameters, model.buffers(), optimizer,
                           *(x() if callable(x) else x for x in extra), counted)
        rest = 0
        for identity, reference in list(self._references.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._references[identity]
            elif identity not in counted:
                rest += storage.nbytes()
        self.points.append(Memory(**sizes, activations=rest))


class MemoryPeak(MemoryCurve):
    """A MemoryCurve of a large model: only a few points, including the peak.

    Adding up the memory of a model of billions of parameters after every op takes minutes. So only
    new bytes are counted op by op, and everything is added up only if there may be a new peak.

    of: Memory -> Memory: selects the part whose peak is recorded
    """

    def __init__(self, *lookup, of=lambda memory: memory, **options):
        super().__init__(*lookup, **options)
        self._part, self._bytes, self._new, self._highest = of, {}, 0, 0

    @property
    def peak(self):
        return max(map(self._part, self.points), key=lambda memory: memory.total)

    def _after_op(self, func, args, kwargs, result):
        for storage in self._see(args, kwargs, result):
            before, now = self._bytes.get(storage._cdata, 0), storage.nbytes()
            self._bytes[storage._cdata] = now
            self._new += max(0, now - before)
        if self._last + self._new > self._highest:
            self._note()
            self._highest, self._new = max(self._highest, self._last), 0
            self._bytes = {key: n for key, n in self._bytes.items() if key in self._references}

    def _note(self):
        super()._note()
        self._last = self._part(self.points[-1]).total
