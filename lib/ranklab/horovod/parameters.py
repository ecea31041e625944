"""The same start on every rank: parameters, optimizer state, and any Python object.

(TensorFlow's script does it with hvd.BroadcastGlobalVariablesHook(0), in its session's hooks.)
"""

import io

import cloudpickle
import torch

from ranklab.horovod.ops import allgather, broadcast_, broadcast_async_, synchronize
from ranklab.horovod.world import rank


def broadcast_parameters(params, root_rank):
    """Every tensor of `params` holds what rank root_rank's does.

    `params` is a state dict, or named parameters, or tensors.

    cost   each tensor once; asked for together, and sent one after the other
    """
    if isinstance(params, dict):
        params = sorted(params.items())
    named = [one if isinstance(one, tuple) else (None, one) for one in params]
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in named
               if isinstance(tensor, torch.Tensor)]  # a state dict may hold other things
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(optimizer, root_rank, model=None):
    """`optimizer` has rank root_rank's state and options; a fresh one may take over a used one's.

    In Horovod a fresh optimizer first takes a step with zero gradients, so that there is state to
    fill. With Adam that step counts, and weight decay acts in it. Here there is no such step.
    `model` is not needed (Horovod asks it about sparse parameters).

    cost   one object (shapes and numbers), then each tensor once
    """
    mine = optimizer.state_dict()
    on_root = rank() == root_rank
    outline = broadcast_object(_map(mine, _Outline.of) if on_root else None, root_rank,
                               name="optimizer.outline")
    at = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
    state = mine if on_root else _map(outline, lambda one: one.empty(at))
    tensors = []
    _map(state, lambda tensor: tensors.append(tensor) or tensor)
    broadcast_parameters([(f"optimizer.{i}", one) for i, one in enumerate(tensors)], root_rank)
    if not on_root:
        optimizer.load_state_dict(state)


class _Outline:
    """A tensor's shape and type, in its place while the state travels as an object."""

    def __init__(self, shape, dtype, is_on_cpu):
        self.shape, self.dtype, self.is_on_cpu = shape, dtype, is_on_cpu

    @classmethod
    def of(cls, tensor):
        return cls(tensor.shape, tensor.dtype, tensor.device.type == "cpu")

    def empty(self, device):
        return torch.empty(self.shape, dtype=self.dtype,
                           device="cpu" if self.is_on_cpu else device)


def _map(state, change):
    """A copy of nested dicts and lists, with every tensor (or outline) changed."""
    if isinstance(state, dict):
        return {key: _map(value, change) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_map(value, change) for value in state)
    return change(state) if isinstance(state, (torch.Tensor, _Outline)) else state


def broadcast_object(obj, root_rank=0, name=None):
    """Rank root_rank's `obj`, on every rank; the others may give None.

    cost   its pickle, and 8 bytes for the length
    """
    name = "broadcast_object" if name is None else name  # Horovod's own is the type of `obj`
    mine = _to_bytes(obj) if rank() == root_rank else torch.empty(0, dtype=torch.uint8)
    length = broadcast_(torch.tensor(len(mine)), root_rank, f"{name}.sz")
    data = mine if rank() == root_rank else torch.empty(length.item(), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.t")
    return obj if rank() == root_rank else _from_bytes(data)


def allgather_object(obj, name=None):
    """[rank 0's obj, rank 1's, ...] on every rank; they may be of different types."""
    name = "allgather_object" if name is None else name
    data = _to_bytes(obj)
    lengths = allgather(torch.tensor([len(data)]), f"{name}.sz")
    everything = allgather(data, f"{name}.t")
    return [_from_bytes(part) for part in everything.split(lengths.tolist())]


def _to_bytes(obj):
    buffer = io.BytesIO()
    cloudpickle.dump(obj, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _from_bytes(data):
    return cloudpickle.loads(data.numpy().tobytes())
