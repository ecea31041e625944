"""memory_of: where the bytes of a training state are, by category."""

from dataclasses import dataclass

from ranklab.meter.storage import storages_of, tensors_in
from ranklab.meter.text import lined_up


@dataclass(frozen=True)
class Memory:
    """Bytes on this rank, by category."""

    parameters: int
    gradients: int
    optimizer_state: int  # also master weights: parameters that only the optimizer holds
    buffers: int

    @property
    def total(self):
        return self.parameters + self.gradients + self.optimizer_state + self.buffers

    def table(self):
        rows = [(name.replace("_", " "), getattr(self, name)) for name in
                ("parameters", "gradients", "optimizer_state", "buffers", "total")]
        return lined_up(("memory", "bytes"), rows)

    def __str__(self):
        return self.table()


def memory_of(model, optimizer=None) -> Memory:
    """The bytes that `model` and `optimizer` hold on this rank, each storage once.

    So tied weights count once, and so do gradients that are views of one flat bucket. Of a DTensor
    the local shard counts. A storage counts whole, in the first category that has it, in the order
    parameters, gradients, optimizer state, buffers. Adam's `step` is there too: 4 bytes a tensor.
    cost   sends nothing
    """
    parameters = list(model.parameters())
    held = [p for group in optimizer.param_groups for p in group["params"]] if optimizer else []
    ours = {id(p) for p in parameters}
    masters = [p for p in held if id(p) not in ours]
    gradients = [p.grad for p in parameters + masters]
    state = tensors_in(list(optimizer.state.values())) if optimizer else []
    seen = set()
    return Memory(
        parameters=_new_bytes(parameters, seen),
        gradients=_new_bytes(gradients, seen),
        optimizer_state=_new_bytes(masters + state, seen),
        buffers=_new_bytes(model.buffers(), seen),
    )


def _new_bytes(tensors, seen):
    """The bytes of all storages under `tensors` that are not in `seen`; they are added to it."""
    total = 0
    for tensor in tensors:
        for storage in [] if tensor is None else storages_of(tensor):
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
    return total
