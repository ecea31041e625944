"""memory_of: the bytes of a training state, by category."""

from dataclasses import asdict, dataclass

from ranklab.meter.storage import storages_of, tensors_in
from ranklab.meter.text import lined_up

ALWAYS_SHOWN = ("parameters", "gradients", "optimizer_state", "buffers")


@dataclass(frozen=True)
class Memory:
    """Bytes on this rank, by category."""

    parameters: int
    gradients: int
    optimizer_state: int  # includes master weights: parameters that only the optimizer holds
    buffers: int
    gathered_parameters: int = 0  # whole parameters that a sharded model holds for a while
    communication_buffers: int = 0
    activations: int = 0  # in a MemoryCurve all other live tensors, with temporaries and the batch

    @property
    def total(self):
        return sum(vars(self).values())  # asdict copies: 40 us, and a meter asks at every op

    def table(self):
        rows = [(name.replace("_", " "), n) for name, n in asdict(self).items()
                if n or name in ALWAYS_SHOWN]
        return lined_up(("memory", "bytes"), [*rows, ("total", self.total)])

    def __str__(self):
        return self.table()


def memory_of(model, optimizer=None, gathered=(), communication=(), shards=()) -> Memory:
    """Return the bytes that `model` and `optimizer` hold on this rank; count each storage once.

    So tied weights count once, and so do gradients that are views of one flat bucket. A bucket
    that exists in addition to the gradients counts as well, if you pass it. A DTensor counts with
    its local shard. A storage resized to 0 (how FSDP frees what it gathered) counts 0 bytes.

    `gathered` and `communication` are tensors that code holds for a while, in any nesting of lists:
    memory_of(model, optimizer, communication=[bucket.flat for bucket in model.buckets]). `shards`
    are the shards of parameters that are empty in `model`; they count as parameters.
    A storage counts whole, in the first category that has it, in this order: gathered parameters,
    parameters, gradients, optimizer state, buffers, communication buffers. Adam's `step` counts
    too: 4 bytes a tensor.
    Cost: sends nothing.
    """
    return Memory(**held_bytes([*model.parameters(), *shards], model.buffers(), optimizer, gathered,
                               communication, set()))


def held_bytes(parameters, buffers, optimizer, gathered, communication, counted):
    """Return {category: bytes}; add the identity of every counted storage to `counted`."""
    groups = optimizer.param_groups if optimizer else []
    optimized = [p for group in groups for p in group["params"]]
    identities = {id(p) for p in parameters}
    masters = [p for p in optimized if id(p) not in identities]
    # functional_call puts a computed tensor in place of a parameter; that has no gradient
    with_gradient = [p for p in parameters + masters if p.is_leaf or p.retains_grad]
    state = tensors_in(list(optimizer.state.values())) if optimizer else []
    return {
        "gathered_parameters": _new_bytes(tensors_in(gathered), counted),
        "parameters": _new_bytes(parameters, counted),
        "gradients": _new_bytes([p.grad for p in with_gradient], counted),
        "optimizer_state": _new_bytes(masters + state, counted),
        "buffers": _new_bytes(buffers, counted),
        "communication_buffers": _new_bytes(tensors_in(communication), counted),
    }


def _new_bytes(tensors, counted):
    """Return the bytes of the storages of `tensors` not yet in `counted`; add them to it."""
    total = 0
    for tensor in tensors:
        for storage in () if tensor is None else storages_of(tensor):
            identity = storage._cdata
            if identity not in counted:
                counted.add(identity)
                total += storage.nbytes()
    return total
