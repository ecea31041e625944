"""The check of shard_parameter: the rows of every rank, beside torch.chunk."""

import torch

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import explain, group_of_mine, hinted, members_of, on_ranks
from ranklab.engine import device
from ranklab.meter import Traffic

CASES = [(shape, dtype) for shape in ((10, 3), (8, 2), (2, 3), (1,), (7, 2, 3), (0, 4))
         for dtype in (torch.float32, torch.float64, torch.bfloat16)]
FAILURES = {
    "too many indices": "A bias is cut like a matrix; its rows are numbers: parameter[a:b].",
    "raised ValueError": "Only the shape () is an error: (1,) is a row, and a rank may have none.",
}


def _parameter(shape, dtype):
    return torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape).to(dtype)


def chunk_of(tensor, ranks, rank):
    """The rank's chunk as torch.chunk cuts; empty where there are fewer chunks than ranks."""
    chunks = tensor.chunk(ranks)
    return chunks[rank] if rank < len(chunks) else tensor[:0]


def _trial(shard_parameter):
    group, found = group_of_mine(), []
    for case in CASES:
        parameter = torch.nn.Parameter(_parameter(*case).to(device()))
        with Traffic() as traffic:
            shard, in_group = shard_parameter(parameter), shard_parameter(parameter, group)
        each = -(-len(parameter) // 4) * parameter.shape[1:].numel() * parameter.itemsize
        is_view = shard.untyped_storage().nbytes() > each or shard.numel() and (
            shard.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr())
        found.append((*(x.detach().clone(memory_format=torch.contiguous_format)
                        for x in (shard, in_group)),
                      bool(traffic.ops), is_view or shard.grad_fn is not None,
                      torch.equal(parameter.cpu(), _parameter(*case))))
    try:
        return found, shard_parameter(torch.ones((), device=device()))
    except ValueError:
        return found, "ValueError"


def check_shard_parameter(shard_parameter):
    with hinted(FAILURES):
        seen = on_ranks(_trial, shard_parameter, ranks=4)
    for rank, (found, scalar) in enumerate(seen):
        for case, (shard, in_group, is_sent, is_tied, is_unchanged) in zip(CASES, found):
            where = f"shape {case[0]}, {case[1]}: rank {rank} of"
            if not is_unchanged:
                raise Mistake(f"{where} 4: the parameter is changed", "Copy its rows, and write "
                              "nothing into it: the caller may need it again.")
            _compare(where, shard, _parameter(*case), rank, range(4))
            _compare(where, in_group, _parameter(*case), rank, members_of(rank))
            if is_sent:
                raise Mistake(f"{where} 4 sends something", "Every rank has the parameter.")
            if is_tied:
                raise Mistake(f"{where} 4: the shard keeps the whole parameter in memory", "It is "
                              "a view of it or of its copy, or has a graph. First cut, then copy: "
                              "parameter.detach()[...].clone().")
        if scalar != "ValueError":
            raise Mistake("a parameter of shape () is no error", "It has no rows: ValueError(...).")
    yield "ceil(n/R) rows each, fewer or none on the last ranks: as torch.chunk, on 4 ranks"
    yield "in groups of 1 and 3 as well; any shape, float32, float64, bfloat16"
    yield "a copy, without a graph; nothing is sent; a parameter without rows is a ValueError"


def _compare(where, got, tensor, rank, members):
    ranks, place = len(members), members.index(rank)
    floor = len(tensor) // ranks
    explain(f"{where} {tuple(members)}: the shard", got, chunk_of(tensor, ranks, place), {
        "as tensor_split cuts": (tensor.tensor_split(ranks)[place], "Each rank has ceil(n/R) rows, "
                                 "as long as there are some. So it is in FSDP2, too."),
        "n // R rows": (tensor[place * floor:][:floor], "Rows are left over: round up, "
                        "-(-n // R), and the last ranks have fewer."),
        "every R-th row": (tensor[place::ranks], "Take rows that lie one after the other."),
        "of all 4 ranks": (chunk_of(tensor, 4, rank), "Hand `group` on: dist.get_rank(group)."),
    }, "Rank r has the rows from r * ceil(n/R) on, all other dims whole. Padding is for messages.")
