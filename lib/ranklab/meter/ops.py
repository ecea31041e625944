"""Recognise which of torch's many c10d ops a call is, and count the bytes that it moves.

Everything in torch.distributed ends in an op of one of two namespaces: `c10d` (dist.all_reduce,
DDP, FSDP2, isend ...) or `_c10d_functional` (functional collectives, DTensor). There one call is
one op: the wrappers around it and the wait after it carry no bytes and are not counted.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from ranklab.meter.costs import Group

NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")


def read_ops(func, args, kwargs):
    """Return the list of Ops of `func(*args, **kwargs)`; empty if it is not communication."""
    if getattr(func, "namespace", None) not in NAMESPACES:
        return []
    reader = _READERS.get(func._schema.name.split("::")[1])
    if reader is None:
        return []
    arguments = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
    handle = arguments.get("process_group", arguments.get("group_name"))
    ops = reader(arguments, _group_of(handle))
    return ops if isinstance(ops, list) else [ops]


def _group_of(handle):
    if isinstance(handle, str):
        handle = _resolve_process_group(handle)
    elif isinstance(handle, torch.ScriptObject):
        handle = dist.ProcessGroup.unbox(handle)
    try:
        ranks = dist.get_process_group_ranks(handle)
    except (KeyError, ValueError):  # a group made by hand, which torch.distributed does not know
        ranks = range(handle.size())
    return Group(tuple(ranks), handle.rank())


def bytes_of(tensors):
    """Return the bytes of a tensor, or of all tensors in a list, or in a list of lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(bytes_of, tensors))


def _first(arguments):
    return next(iter(arguments.values()))


def _input(arguments):
    return next(arguments[name] for name in ("input_tensor", "inputs", "input")
                if name in arguments)


def _all_reduce(arguments, group):
    tensors, size = _first(arguments), len(group.ranks)
    chunks = [0] * size
    for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
        length, longer = divmod(tensor.numel(), size)  # the first `longer` chunks have one more
        for place in range(size):
            chunks[place] += (length + (place < longer)) * tensor.element_size()
    return group.ring("all_reduce", chunks)


def _all_gather(arguments, group):
    return group.ring("all_gather", [bytes_of(_input(arguments))] * len(group.ranks))


def _all_gather_list(arguments, group):  # one tensor per rank; NCCL lets them differ in size
    return group.ring("all_gather", [bytes_of(part) for part in arguments["output_tensors"][0]])


def _all_gather_lists(arguments, group):  # several tensors per rank
    return group.ring("all_gather", [bytes_of(parts) for parts in arguments["output_lists"]])


def _reduce_scatter(arguments, group):
    size = len(group.ranks)
    return group.ring("reduce_scatter", [bytes_of(_input(arguments)) // size] * size)


def _reduce_scatter_list(arguments, group):
    return group.ring("reduce_scatter", [bytes_of(part) for part in arguments["input_tensors"][0]])


def _broadcast(arguments, group):
    root = arguments.get("root_rank", arguments.get("src"))
    return group.chain("broadcast", bytes_of(_first(arguments)), root)


def _reduce(arguments, group):
    return group.chain("reduce", bytes_of(_first(arguments)), arguments["root_rank"] + 1)


def _send(arguments, group):
    return group.send(bytes_of(_first(arguments)), arguments["dst"])


def _recv(arguments, group):
    return group.recv(bytes_of(_first(arguments)), arguments.get("src"))


def _batch(arguments, group):
    calls = zip(arguments["op_list"], arguments["peer_list"], arguments["tensors"])
    return [(group.send if op == "isend" else group.recv)(bytes_of(x), peer)
            for op, peer, x in calls]


def _all_to_all(arguments, group):
    """With split sizes: rows of dimension 0 for each rank. Without: equal parts."""
    x = arguments["input"]
    y = arguments.get("output", x)  # the functional one makes its own output, with rows like x's

    def parts(tensor, rows):
        if not rows:
            return [bytes_of(tensor) // len(group.ranks)] * len(group.ranks)
        row = math.prod(tensor.shape[1:]) * tensor.element_size()
        return [n * row for n in rows]

    outgoing = parts(x, arguments.get("input_split_sizes"))
    incoming = parts(y, arguments.get("output_split_sizes"))
    return group.direct("all_to_all", bytes_of(x), outgoing, incoming)


def _all_to_all_list(arguments, group):
    outgoing = [bytes_of(part) for part in arguments["input_tensors"]]
    incoming = [bytes_of(part) for part in arguments["output_tensors"]]
    return group.direct("all_to_all", sum(outgoing), outgoing, incoming)


def _only(place, n):
    return [0] * place + [n]


def _gather(arguments, group):
    root, size = arguments["root_rank"], bytes_of(arguments["input_tensors"])
    if group.place != root:
        return group.direct("gather", size, outgoing=_only(root, size))
    incoming = [bytes_of(part) for part in arguments["output_tensors"][0]]
    return group.direct("gather", sum(incoming), incoming=incoming)


def _scatter(arguments, group):
    root, size = arguments["root_rank"], bytes_of(arguments["output_tensors"])
    if group.place != root:
        return group.direct("scatter", size, incoming=_only(root, size))
    outgoing = [bytes_of(part) for part in arguments["input_tensors"][0]]
    return group.direct("scatter", sum(outgoing), outgoing=outgoing)


def _barrier(arguments, group):
    return group.op("barrier", 0)


_READERS = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce,
    "all_reduce_coalesced": _all_reduce,
    "all_reduce_coalesced_": _all_reduce,
    "allgather_": _all_gather_list,
    "allgather_coalesced_": _all_gather_lists,
    "_allgather_base_": _all_gather,
    "allgather_into_tensor_coalesced_": _all_gather,
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_out": _all_gather,
    "all_gather_into_tensor_coalesced": _all_gather,
    "reduce_scatter_": _reduce_scatter_list,
    "_reduce_scatter_base_": _reduce_scatter,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_out": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _reduce_scatter,
    "broadcast_": _broadcast,
    "broadcast": _broadcast,
    "reduce_": _reduce,
    "send": _send,
    "isend": _send,
    "recv_": _recv,
    "recv_any_source_": _recv,
    "irecv": _recv,
    "batch_p2p_ops": _batch,
    "alltoall_": _all_to_all_list,
    "alltoall_base_": _all_to_all,
    "all_to_all_single": _all_to_all,
    "shard_dim_alltoall": _all_to_all,
    "gather_": _gather,
    "scatter_": _scatter,
    "barrier": _barrier,
    "monitored_barrier_": _barrier,
}
