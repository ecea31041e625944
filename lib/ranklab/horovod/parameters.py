"""The same start on every rank: parameters, optimizer state, and any Python object.

(TensorFlow's script does it with hvd.BroadcastGlobalVariablesHook(0), in its session's hooks.)
"""

import cloudpickle
import torch
from torch.utils._pytree import tree_map_only

from ranklab.horovod.ops import allgather, broadcast_, broadcast_async_, synchronize
from ranklab.horovod.world import rank


def broadcast_parameters(params, root_rank):
    """Copy rank root_rank's values into every tensor of `params`, on all ranks.

    `params` is a state dict, or named parameters, or tensors.

    Cost: each tensor once; all are requested together, and sent one after the other.
    """
    if isinstance(params, dict):
        params = sorted(params.items())
    named = [one if isinstance(one, tuple) else (None, one) for one in params]
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in named
               if isinstance(tensor, torch.Tensor)]  # a state dict may hold more than tensors
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(optimizer, root_rank):
    """Copy rank root_rank's optimizer state and options to `optimizer`, on all ranks.

    A new optimizer may receive the state of a used one.
    In Horovod a new optimizer first takes a step with zero gradients, so that there is state to
    fill. In Adam that step counts, and weight decay acts in it. Here there is no such step.

    Cost: the state of rank root_rank once, as one object in the CPU's memory.
    """
    state = tree_map_only(torch.Tensor, torch.Tensor.cpu, optimizer.state_dict())
    state = broadcast_object(state, root_rank, name="optimizer")
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def broadcast_object(obj, root_rank=0, name="broadcast_object"):
    """Return rank root_rank's `obj` on every rank; the other ranks may pass None.

    Cost: one pickle, and 8 bytes for the length.
    """
    on_root = rank() == root_rank
    pickled = bytearray(cloudpickle.dumps(obj) if on_root else b"")
    length = broadcast_(torch.tensor(len(pickled)), root_rank, f"{name}.sz")
    data = torch.frombuffer(pickled or bytearray(length.item()), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.t")
    return obj if on_root else cloudpickle.loads(data.numpy().tobytes())


def allgather_object(obj, name="allgather_object"):
    """Return the objects of all ranks, as a list.

    Cost: their pickles, and 8 bytes for each length.
    """
    data = torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)
    lengths = allgather(torch.tensor([len(data)]), f"{name}.sz").tolist()
    return [cloudpickle.loads(part.numpy().tobytes())
            for part in allgather(data, f"{name}.t").split(lengths)]
