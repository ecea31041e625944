"""Which of torch's many c10d ops a call is, and how many bytes it moves.

Everything in torch.distributed ends in an op of one of two namespaces: `c10d` (dist.all_reduce,
DDP, FSDP2, isend ...) or `_c10d_functional` (functional collectives, DTensor). One call is one op
there: the wrappers around it and the wait after it carry no bytes and are not read.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from ranklab.meter.costs import Group

NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")


def read_ops(func, args, kwargs):
    """The Ops of `func(*args, **kwargs)`, as a list; empty if it is no communication."""
    if getattr(func, "namespace", None) not in NAMESPACES:
        return []
    reader = _READERS.get(func._schema.name.split("::")[1])
    if reader is None:
        return []
    given = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
    ops = reader(given, _group_of(given.get("process_group", given.get("group_name"))))
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
    """The bytes of a tensor, or of all tensors in a list, or in a list of lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(bytes_of(each) for each in tensors)


def _first(given):
    return next(iter(given.values()))


def _input(given):
    return next(given[name] for name in ("input_tensor", "inputs", "input") if name in given)


def _all_reduce(given, group):
    tensors, size = _first(given), len(group.ranks)
    chunks = [0] * size
    for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
        each, longer = divmod(tensor.numel(), size)  # the first `longer` chunks have one more
        for place in range(size):
            chunks[place] += (each + (place < longer)) * tensor.element_size()
    return group.ring("all_reduce", chunks)


def _all_gather(given, group):
    return group.ring("all_gather", [bytes_of(_input(given))] * len(group.ranks))


def _all_gather_list(given, group):  # one tensor per rank; NCCL lets them differ in size
    return group.ring("all_gather", [bytes_of(part) for part in given["output_tensors"][0]])


def _all_gather_lists(given, group):  # several tensors per rank
    return group.ring("all_gather", [bytes_of(parts) for parts in given["output_lists"]])


def _reduce_scatter(given, group):
    size = len(group.ranks)
    return group.ring("reduce_scatter", [bytes_of(_input(given)) // size] * size)


def _reduce_scatter_list(given, group):
    return group.ring("reduce_scatter", [bytes_of(part) for part in given["input_tensors"][0]])


def _broadcast(given, group):
    root = given.get("root_rank", given.get("src"))
    return group.chain("broadcast", bytes_of(_first(given)), root)


def _reduce(given, group):
    return group.chain("reduce", bytes_of(_first(given)), given["root_rank"] + 1)


def _send(given, group):
    return group.send(bytes_of(_first(given)), given["dst"])


def _recv(given, group):
    return group.recv(bytes_of(_first(given)), given.get("src"))


def _batch(given, group):
    calls = zip(given["op_list"], given["peer_list"], given["tensors"])
    return [(group.send if op == "isend" else group.recv)(bytes_of(x), peer)
            for op, peer, x in calls]


def _all_to_all(given, group):
    """With split sizes: rows of dimension 0 for each rank. Without: equal parts."""
    x = given["input"]
    y = given.get("output", x)  # the functional one makes its own output, with rows like x's

    def parts(tensor, rows):
        if not rows:
            return [bytes_of(tensor) // len(group.ranks)] * len(group.ranks)
        row = math.prod(tensor.shape[1:]) * tensor.element_size()
        return [n * row for n in rows]

    to = parts(x, given.get("input_split_sizes"))
    come = parts(y, given.get("output_split_sizes"))
    return group.direct("all_to_all", bytes_of(x), to, come)


def _all_to_all_list(given, group):
    to = [bytes_of(part) for part in given["input_tensors"]]
    come = [bytes_of(part) for part in given["output_tensors"]]
    return group.direct("all_to_all", sum(to), to, come)


def _only(place, n):
    return [0] * place + [n]


def _gather(given, group):
    root, mine = given["root_rank"], bytes_of(given["input_tensors"])
    if group.me != root:
        return group.direct("gather", mine, to=_only(root, mine))
    come = [bytes_of(part) for part in given["output_tensors"][0]]
    return group.direct("gather", sum(come), come=come)


def _scatter(given, group):
    root, mine = given["root_rank"], bytes_of(given["output_tensors"])
    if group.me != root:
        return group.direct("scatter", mine, come=_only(root, mine))
    to = [bytes_of(part) for part in given["input_tensors"][0]]
    return group.direct("scatter", sum(to), to=to)


def _barrier(given, group):
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
