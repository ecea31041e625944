"""SavedActivations: what autograd keeps between forward and backward."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from ranklab.meter.storage import storages_of
from ranklab.meter.text import lined_up


@dataclass(frozen=True)
class Saved:
    """The first tensor through which a storage was saved, and the bytes of the whole storage."""

    shape: tuple
    dtype: torch.dtype
    bytes: int


class SavedActivations:
    """Count the bytes that autograd saves for backward inside the block, each storage once.

        with SavedActivations() as saved:
            loss = model(x).sum()
        saved.bytes

    Parameters and their views are left out: they are in memory anyway. With `model`, its buffers
    are left out as well. A storage counts whole, because a saved slice keeps all of it alive. The
    input counts if a layer saves it. The 16-bit copies of weights that autocast makes count,
    because they are new tensors.

    `bytes` and `tensors` cover all that was saved; `live_bytes` is what backward has not freed yet;
    `peak_bytes` is the most at one time. So put only the forward in the block to see what is kept
    for backward, or a whole step to see the peak with checkpointing, which saves again what it
    recomputes. A storage that was freed and is saved again counts in `bytes` again. A storage
    counts with its size when it was saved, even if it is resized later.

    Not seen: tensors that a custom Function sets on ctx itself, without save_for_backward;
    what torch.utils.checkpoint(use_reentrant=False) recomputes, because it keeps that under its
    own hooks. For the same reason blocks do not nest: only the innermost counts.
    """

    def __init__(self, model=None):
        self.tensors = []  # Saved, one per storage
        self.bytes = self.live_bytes = self.peak_bytes = 0
        owned = [*model.parameters(), *model.buffers()] if model else []
        self._owned = {storage._cdata for tensor in owned for storage in storages_of(tensor)}
        self._holders = Counter()  # identity of a storage -> saved tensors that keep it
        self._sizes = {}  # identity of a storage -> its bytes when it was first saved

    def __enter__(self):
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)
        self._hooks = None  # so that the counts pickle

    def _pack(self, tensor):
        storages = storages_of(tensor)
        if _is_parameter(tensor) or all(storage._cdata in self._owned for storage in storages):
            return tensor
        holder = _Holder(tensor, self)
        fresh = [storage for storage in storages if storage._cdata not in self._holders]
        self._holders.update(storage._cdata for storage in storages)
        if fresh:
            self._sizes.update((storage._cdata, storage.nbytes()) for storage in fresh)
            size = sum(storage.nbytes() for storage in fresh)
            self.tensors.append(Saved(tuple(tensor.shape), tensor.dtype, size))
            self.bytes += size
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return holder

    def _release(self, storages):
        for storage in storages:
            self._holders[storage._cdata] -= 1
            if not self._holders[storage._cdata]:
                del self._holders[storage._cdata]
                self.live_bytes -= self._sizes.pop(storage._cdata)

    def table(self):
        """Return a text table, the largest sum first.

        Tensors of the same shape and dtype are in one line.
        """
        counts, sizes = Counter(), Counter()
        for saved in self.tensors:
            name = f"{str(saved.dtype).removeprefix('torch.')} {saved.shape}"
            counts[name] += 1
            sizes[name] += saved.bytes
        rows = [(name, counts[name], size) for name, size in sizes.most_common()]
        rows.append(("sum", len(self.tensors), self.bytes))
        return lined_up(("saved for backward", "tensors", "bytes"), rows)


class _Holder:
    """Stands for a saved tensor in the graph; when the graph frees it, the meter is told."""

    def __init__(self, tensor, meter):
        # Detached, because an op that saves its own output would keep itself alive forever.
        self.tensor = tensor.detach()
        self._meter = meter

    def __del__(self):
        self._meter._release(storages_of(self.tensor))


def _unpack(packed):
    return packed.tensor if isinstance(packed, _Holder) else packed


def _is_parameter(tensor):
    return any(isinstance(t, torch.nn.Parameter) for t in (tensor, tensor._base))
