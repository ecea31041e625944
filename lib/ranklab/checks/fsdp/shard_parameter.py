"""The check of shard_parameter: the rows of every rank, beside torch.chunk."""

from functools import partial

import torch

from ranklab.checks.beside import expect, on_groups, refused
from ranklab.checks.trial import explain
from ranklab.engine import device
from ranklab.meter import Traffic

CASES = [(shape, dtype) for shape in ((10, 3), (8, 2), (2, 3), (1,), (7, 2, 3), (0, 4))
         for dtype in (torch.float32, torch.float64, torch.bfloat16)]
FAILURES = {
    "RuntimeError: view size is not compatible.*": "A parameter need not be contiguous: "
    "parameter[a:b], or reshape.",
    "IndexError: too many indices for tensor of dimension 1":
        "A bias is cut like a matrix; its rows are numbers: parameter[a:b].",
    "ValueError: .*": "Only the shape () is an error: (1,) is a row, and a rank may have none.",
}


def chunk_of(tensor, ranks, rank):
    """The rank's chunk as torch.chunk cuts; empty where there are fewer chunks than ranks."""
    chunks = tensor.chunk(ranks)
    return chunks[rank] if rank < len(chunks) else tensor[:0]


def _trial(shard_parameter, ranks):
    for shape, dtype in CASES:
        yield partial(_compare, shard_parameter, shape, dtype, ranks)
    yield refused("a parameter of shape ()", partial(shard_parameter,
                                                     torch.ones((), device=device())))


def check_shard_parameter(shard_parameter):
    on_groups(_trial, shard_parameter, failures=FAILURES)
    yield "ceil(n/R) rows each, fewer or none on the last ranks: as torch.chunk, on 4 ranks"
    yield "in groups of 1, 2 and 3 as well; any shape and strides, 3 types"
    yield "a copy, without a graph; nothing is sent; a parameter without rows is a ValueError"


def _compare(shard_parameter, shape, dtype, ranks):
    R, place, floor = ranks.size, ranks.index, shape[0] // ranks.size
    where = f"shape {shape}, {dtype}: {ranks}"
    tensor = torch.arange(1.0, torch.Size(shape).numel() + 1, device=device()).view(shape).to(dtype)
    given = tensor.mT.contiguous().mT if dtype == torch.float64 and tensor.dim() > 1 else tensor
    parameter = torch.nn.Parameter(given.clone())
    parameter.grad = gradient = torch.ones_like(parameter)
    with Traffic() as traffic:
        shard = shard_parameter(parameter, ranks.group)
    expect(torch.equal(parameter, tensor) and parameter.requires_grad
           and parameter.grad is gradient, f"{where}: the parameter is changed",
           "Copy its rows. Its numbers, gradient and requires_grad stay: the caller may "
           "need them.")
    expect(getattr(shard, "grad", None) is None, f"{where}: the shard has a gradient", "Only "
           "numbers are copied: gradients come by a backward.")
    explain(f"{where}: the shard", shard, chunk_of(tensor, R, place), {
        "as tensor_split cuts": (tensor.tensor_split(R)[place], "Each rank has ceil(n/R) rows, "
                                 "as long as there are some. So it is in FSDP2, too."),
        "n // R rows": (tensor[place * floor:][:floor], "Rows are left over: round up, "
                        "-(-n // R), and the last ranks have fewer."),
        "every R-th row": (tensor[place::R], "Take rows that lie one after the other."),
    }, "Rank r has the rows from r * ceil(n/R) on, all other dims whole. Padding is for messages.")
    expect(not traffic.ops, f"{where} sends something", "Every rank has the parameter.")
    memory, its = (x.untyped_storage() for x in (shard, parameter))
    is_view = shard.numel() and memory.data_ptr() == its.data_ptr()
    rows = -(-len(tensor) // R) * tensor.itemsize * tensor.shape[1:].numel()
    expect(not is_view and memory.nbytes() <= rows and shard.grad_fn is None,
           f"{where}: the shard keeps the whole parameter in memory", "It is a view of it or of "
           "its copy, or has a graph. First cut, then copy: parameter.detach()[...].clone().")
