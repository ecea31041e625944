"""shard_parameter: the rows of every rank, compared with torch.chunk."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.prover import ALL, GROUPS, AtMost, Must, Proof, Slip, Stage, must_refuse
from ranklab.engine import device
from ranklab.fsdp import shard_parameter
from ranklab.meter import Traffic

FINE = {"float64": 1 + 2.0**-26}  # times whole numbers: lost in float32


class Case(NamedTuple):
    """A parameter; `first` is its first number."""

    shape: tuple
    dtype: str = "float32"
    strided: bool = False
    frozen: bool = False
    first: int = 1

    def __str__(self):
        suffix = ", not contiguous" * self.strided + ", frozen" * self.frozen
        return f"a parameter of shape {self.shape}, {self.dtype}{suffix}"

    def tensor(self):
        n = torch.Size(self.shape).numel()
        numbers = (torch.arange(n, device=device()) + self.first).to(getattr(torch, self.dtype))
        tensor = (numbers * FINE.get(self.dtype, 1)).view(self.shape)
        if not self.strided:
            return tensor
        return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor.repeat_interleave(2)[::2]

    def parameter(self):
        """Return it with a gradient, unless it is frozen."""
        parameter = nn.Parameter(self.tensor(), not self.frozen)
        if not self.frozen:
            parameter.grad = torch.ones_like(parameter)
        return parameter


CASES = (
    *(Case((10, 3), dtype) for dtype in ("float32", "float64", "bfloat16")),
    Case((10, 3), first=9), *map(Case, ((8, 2), (2, 3), (1,), (9,), (7, 2, 3), (0, 4), ())),
    Case((10, 3), "float64", strided=True), Case((7, 2, 3), strided=True),
    Case((20,), "bfloat16", strided=True), Case((5, 2), frozen=True))
SHARD, REFUSED = "the shard", "what the shape () raises"
STAYS = ("the parameter afterwards", "its gradient afterwards",
         "does it need a gradient afterwards?")
COST = ("the shard's gradient", "messages", "does the shard have a graph?",
        "memory that the shard shares with the parameter", "bytes that the shard keeps in memory",
        REFUSED)


def _see(fn, case, ranks):
    parameter = case.parameter()
    if not case.shape:
        yield {REFUSED: must_refuse(fn, parameter, **ranks.keywords)}
        return
    with Traffic() as traffic:
        shard = fn(parameter, **ranks.keywords)
    if not isinstance(shard, torch.Tensor):
        yield {SHARD: shard}
        return
    memory = shard.untyped_storage()
    is_view = bool(len(shard)) and memory.data_ptr() == parameter.untyped_storage().data_ptr()
    rows = -(-len(parameter) // ranks.size)
    yield {
        SHARD: shard, "the parameter afterwards": parameter,
        "its gradient afterwards": parameter.grad,
        "does it need a gradient afterwards?": Must(parameter.requires_grad, not case.frozen),
        "the shard's gradient": shard.grad if shard.is_leaf else None,
        "messages": AtMost(len(traffic.ops), 0),
        "does the shard have a graph?": Must(shard.grad_fn is not None, False),
        "memory that the shard shares with the parameter": Must(is_view, False),
        "bytes that the shard keeps in memory": AtMost(
            memory.nbytes(), rows * parameter.shape[1:].numel() * parameter.itemsize),
    }


def chunk_of(tensor, ranks, rank):
    """Return the rank's chunk from torch.chunk; empty if there are fewer chunks than ranks."""
    chunks = tensor.chunk(ranks)
    return chunks[rank] if rank < len(chunks) else tensor[:0]


def by_chunk(parameter, group=None):
    if not parameter.shape:
        raise ValueError("shape ()")
    R, rank = dist.get_world_size(group), dist.get_rank(group)
    return chunk_of(parameter.detach(), R, rank).contiguous().clone()


UP, BEYOND = "-(-len(parameter) // R)", "  # the last ones may lie beyond the end"
TAKE = "parameter.detach()[first:stop].clone()"
CUT = f"return {TAKE}"
RANK, RANKS = "dist.get_rank(group)", "dist.get_world_size(group)"
SHAPELESS = "if parameter.dim() == 0:"
SHARD_PARAMETER = Proof(
    shard_parameter,
    Stage({"ceil(n/R) rows each, fewer or none on the last ranks: like torch.chunk; on 4 ranks, "
           "and in groups of 1, 2 and 3; any shape and strides, 3 types": (SHARD,),
           "the parameter stays as it is": STAYS,
           "a copy, without a graph; nothing is sent; a parameter without rows is a ValueError":
           COST},
          _see, CASES, (4,), (ALL, *GROUPS), oracle=by_chunk),
    mistakes=(
        Slip("Round up, -(-n // R), so that no rows are left over; the last ranks have fewer.",
             (UP, "len(parameter) // R"),
             (UP, "len(parameter) // R",
              BEYOND, "\n    stop = len(parameter) if rank == R - 1 else stop")),
        Slip("When R divides n, this is one row too many: round up, -(-n // R).",
             (UP, "len(parameter) // R + 1")),
        Slip("Each rank has ceil(n/R) rows until none are left, as with torch.chunk. tensor_split "
             "gives the leftover rows to the first ranks.",
             (TAKE, "parameter.detach().tensor_split(R)[rank].clone()")),
        Slip("Take consecutive rows.",
             (TAKE, "parameter.detach()[rank::R].clone()")),
        Slip("With few rows, torch.chunk returns fewer chunks than there are ranks: the remaining "
             "ranks get none, parameter[:0].",
             (TAKE, "parameter.detach().chunk(R)[rank].clone()"),
             (TAKE, "parameter.detach().split(max(length, 1))[rank].clone()")),
        Slip("Rank r's rows start at r * ceil(n/R): rank 0 has the first ones.",
             ("first, stop = rank", "rank = R - 1 - rank\n    first, stop = rank")),
        Slip("This is a view, so the parameter could not be freed. Copy the rows: clone().",
             (TAKE, TAKE.replace(".clone()", "")),
             (TAKE, "parameter.detach()[first:stop].contiguous()"),
             (TAKE, "parameter.data[first:stop]")),
        Slip("A slice of a copy keeps the whole copy in memory. Slice first, then copy.",
             (TAKE, "parameter.detach().clone()[first:stop]")),
        Slip("The parameter must stay trainable: detach() cuts the graph, and leaves the parameter "
             "unchanged.",
             ("parameter.detach()[", "parameter.requires_grad_(False)[")),
        Slip("A parameter need not be contiguous, but view() requires it: use parameter[a:b], or "
             "reshape.", (TAKE, "parameter.detach().view(-1).view(parameter.shape)[first:stop]"
                                ".clone()")),
        Slip("Copy only the numbers: a gradient comes from a backward.",
             (CUT, f"rows = {TAKE}\n    if parameter.grad is not None:\n"
                   "        rows.grad = parameter.grad[first:stop]\n    return rows"),
             (CUT, f"rows = {TAKE}\n    rows.grad = parameter.grad[first:stop]\n    return rows")),
        Slip("Leave the parameter's gradient alone: the caller may need it.",
             (CUT, f"rows = {TAKE}\n    parameter.grad = None\n    return rows")),
        Slip("Leave the parameter's numbers alone: the caller will free it.",
             (CUT, f"rows = {TAKE}\n    parameter.data.zero_()\n    return rows"),
             (CUT, f"rows = {TAKE}\n    parameter.data = rows\n    return rows"),
             (CUT, f"rows = {TAKE}\n    parameter.data = parameter.data[:0]\n    return rows")),
        Slip("The shard has a graph, which keeps the parameter alive: slice parameter.detach().",
             (TAKE, TAKE.replace(".detach()", ""))),
        Slip("Pass `group` on: get_rank(group), get_world_size(group).",
             (RANK, "dist.get_rank()", RANKS, "dist.get_world_size()"), (RANK, "dist.get_rank()"),
             (RANKS, "dist.get_world_size()")),
        Slip("Padding is only for messages: the last ranks have fewer rows, or none.",
             (CUT, f"rows = {TAKE}\n    padding = rows.new_zeros(length - len(rows), "
                   "*rows.shape[1:])\n    return torch.cat([rows, padding])"), torch=torch),
        Slip("A shard keeps all other dims of the parameter: (rows, ...).",
             (TAKE, f"{TAKE}.flatten()")),
        Slip("Cut between rows, not in the middle of one.",
             (TAKE, "parameter.detach().flatten()[-(-parameter.numel() // R) * rank :]"
                    "[: -(-parameter.numel() // R)].clone()")),
        Slip("Cut along the first dimension: a bias has no second one.",
             (UP, "-(-parameter.shape[-1] // R)", TAKE, TAKE.replace("[first", "[..., first"))),
        Slip("The shard must have the parameter's dtype.", (TAKE, f"{TAKE}.float()")),
        Slip("The rows go through float32, which rounds float64.",
             (TAKE, f"{TAKE}.float().to(parameter)")),
        Slip("Keep nothing from one call to the next: another parameter of the same shape may hold "
             "different numbers.",
             ("group=None", "group=None, kept={}", TAKE, "kept.setdefault((rank, R, "
                          f"parameter.shape, parameter.dtype), {TAKE}).clone()")),
        Slip("Every rank already has the whole parameter: nothing needs to be sent.",
             (CUT, "whole = parameter.detach().clone(memory_format=torch.contiguous_format)\n"
                   "    dist.broadcast(whole, group=group, group_src=0)\n"
                   "    return whole[first:stop].clone()"), torch=torch),
        Slip("Only the shape () is an error: (1,) is one row, and a rank may have no rows.",
             (SHAPELESS, "if len(parameter) < dist.get_world_size(group):"),
             (SHAPELESS, "if parameter.numel() <= 1:")),
        Slip("Keep the stub's ValueError for the shape ().", (SHAPELESS, "if False:"),
             (SHAPELESS, "if parameter.dim() == 0:\n        return parameter.detach().clone()\n"
                         "    if False:")),
    ), hints=(
        "How many rows must each rank have, so that R times that number is enough?",
        "length = ceil(n / R), which is -(-n // R). Rank r's rows start at r * length; a slice "
        "that goes past the end is cut short, or empty.",
        "length = -(-len(parameter) // dist.get_world_size(group)); first = length * "
        "dist.get_rank(group); return parameter.detach()[first : first + length].clone()",
    ))
