"""The check of partition_flat: one flat piece of memory, and who owns which part of it."""

import contextlib
from typing import NamedTuple

import torch

from ranklab.checks.prover import Proof, Slip, Stage
from ranklab.engine import device
from ranklab.engine.report import count_ranks
from ranklab.zero import partition_flat

FLOAT32, FLOAT64, BFLOAT16 = torch.float32, torch.float64, torch.bfloat16


class Case(NamedTuple):
    what: str
    ranks: int
    shapes: tuple
    dtype: torch.dtype = FLOAT32
    layout: str = ""

    def __str__(self):
        return f"{self.what} on {count_ranks(self.ranks)}"

    def tensors(self, turn):
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        numbers = (torch.arange(sum(sizes), device=device()) + 1 + turn).to(self.dtype)
        if self.dtype == FLOAT64:
            numbers *= 1 + 2.0**-26  # lost in float32
        tensors = [part.clone().view(shape)
                   for part, shape in zip(numbers.split(sizes), self.shapes)]
        if self.layout == "transposed":
            return [x.t().contiguous().t() for x in tensors]
        return [torch.stack([x.t(), x.t()], -1)[..., 0].t() for x in tensors
                ] if self.layout == "with gaps" else tensors


VECTORS, SHAPES = ((10,), (3,), (4,)), ((2, 3), (), (0, 5))
CASES = (
    *(Case("sizes 10, 3, 4", ranks, VECTORS) for ranks in (4, 3, 1)),
    *(Case("a matrix, a scalar and an empty tensor", ranks, SHAPES) for ranks in (2, 7, 9)),
    *(Case("float64", ranks, ((3, 2), (5,)), FLOAT64) for ranks in (2, 11)),
    *(Case("bfloat16", ranks, ((7,),), BFLOAT16) for ranks in (2, 7)),
    Case("nothing but an empty tensor", 3, ((0,),)),
    Case("a transposed matrix, and every second number of a vector,", 2, ((3, 2), (3,)),
         layout="with gaps"),
    Case("a transposed matrix without gaps", 2, ((3, 2),), layout="transposed"),
)
WRITTEN, INPUT = "flat after a write into every shard", "tensor {} after that write"


def _see(fn, case):
    """Look at two calls: state kept from the first would show in the second."""
    for turn in (0, 1):
        tensors = case.tensors(turn)
        with _filled_memory():
            flat, shards = fn(tensors, case.ranks)
        values = {"the shape of flat": [*flat.shape],
                  "the lengths of the shards": [len(shard) for shard in shards],
                  "flat": flat.clone()}
        values |= {f"shard {r}": shard.clone() for r, shard in enumerate(shards)}
        values |= {f"tensor {i} afterwards": x.clone() for i, x in enumerate(tensors)}
        for r, shard in enumerate(shards):
            shard.fill_(-1 - r)
        yield values | {WRITTEN: flat} | {
            INPUT.format(i): tensor for i, tensor in enumerate(tensors)}


@contextlib.contextmanager
def _filled_memory():
    """Fill new memory with NaN inside the block, so that it isn't zero by chance."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def one_by_one(tensors, ranks):
    numbers = [number for tensor in tensors for number in tensor.reshape(-1).tolist()]
    while len(numbers) % ranks:
        numbers.append(0)
    flat, length = tensors[0].new_tensor(numbers), len(numbers) // ranks
    return flat, [flat[r * length : (r + 1) * length] for r in range(ranks)]


LENGTH, ZEROS = "length = -(-n // ranks)", "tensors[0].new_zeros(length * ranks)"
CUT = "flat.view(ranks, length).unbind()"
COPY = "torch.cat([tensor.reshape(-1) for tensor in tensors]"
FLATTEN, OUT, RETURN = "tensor.reshape(-1)", "out=flat[:n])", "    return flat, "


def pads_each(tensors, ranks):
    padded = [torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % ranks)) for x in tensors]
    flat = torch.cat(padded)
    return flat, flat.view(ranks, -1).unbind()


PARTITION = Proof(
    partition_flat,
    Stage({"all numbers one after the other, zeros at the end; R shards of ceil(n/R)": (),
           "any shape, also scalars and empty tensors; float32, float64, bfloat16": (),
           "also what is not contiguous, row by row": (),
           "each shard is a view of flat; flat is a copy of the tensors":
           (WRITTEN, *map(INPUT.format, range(3)))},
          _see, CASES, oracle=one_by_one),
    mistakes=(
        Slip("Numbers are lost: round n / R up with -(-n // ranks).",
             (LENGTH, "length = n // ranks", f"{COPY}, {OUT}",
              f"flat[:] = {COPY})[: length * ranks]")),
        Slip("Don't pad if R divides n: ceil(n / R) numbers in each shard are enough.",
             (LENGTH, "length = n // ranks + 1")),
        Slip("If there are no numbers, the shards are empty as well.", (LENGTH, f"{LENGTH} or 1")),
        Slip("Before you cut, pad with zeros to a multiple of the number of ranks.",
             ("length * ranks)", "n)")),
        Slip("All shards must have the same length, because a reduce-scatter gives every rank "
             "equal parts. Pad the end with zeros.",
             ("length * ranks)", "n)", CUT, "flat.tensor_split(ranks)"),
             ("length * ranks)", "n)", CUT, "flat.chunk(ranks)"),
             ("length * ranks)", "n)", CUT, "flat.split(max(1, length))")),
        Slip("Pad the end with zeros: use new_zeros or pad.", ("new_zeros", "new_empty"),
             (ZEROS, "tensors[0].new_full((length * ranks,), 7)")),
        Slip("The zeros go at the end of flat, not at its beginning.",
             (OUT, "out=flat[len(flat) - n :])")),
        Slip("Pad flat once, at its end, not each tensor.", pads_each),
        Slip("Keep the tensors' dtype: tensors[0].new_zeros() gives flat the same dtype.",
             (ZEROS, "torch.zeros(length * ranks)")),
        Slip("A shard is one contiguous piece: a row of flat.view(R, length), not every R-th "
             "number.",
             (CUT, "[flat[r::ranks] for r in range(ranks)]"),
             (CUT, "flat.view(length, ranks).unbind(1)")),
        Slip("Shard r begins at r * ceil(n / R): the first shard belongs to rank 0.",
             (CUT, f"{CUT}[::-1]"), (CUT, f"[*{CUT}[1:], *{CUT}[:1]]")),
        Slip("The tensors keep their order in flat.", ("for tensor in tensors],",
                                                       "for tensor in reversed(tensors)],")),
        Slip("Flatten row by row: reshape(-1) follows a tensor's own order, which need not be the "
             "order in memory.", (FLATTEN, "tensor.t().reshape(-1)"),
             (FLATTEN, "tensor.as_strided((tensor.numel(),), (1,))"),
             (FLATTEN, "tensor.clone().as_strided((tensor.numel(),), (1,))")),
        Slip("view(-1) works only on contiguous tensors; reshape(-1) works on any tensor.",
             (FLATTEN, "tensor.view(-1)")),
        Slip("Flatten each tensor before torch.cat: tensor.reshape(-1).", (FLATTEN, "tensor")),
        Slip("A shard is a view of flat, not a copy, so that flat also changes in each step.",
             (CUT, "[x.clone() for x in flat.view(ranks, length)]"),
             (RETURN, "    return flat.clone(), ")),
        Slip("flat must be new memory, even if there is only one tensor.",
             (RETURN, f"    if len(tensors) == 1 and len(flat) == n:\n"
              f"        flat = tensors[0].view(-1)\n{RETURN}"),
             (RETURN, f"    if len(tensors) == 1 and len(flat) == n:\n"
              f"        flat = tensors[0].reshape(-1)\n{RETURN}")),
        Slip("Leave the tensors as they are: they must not become views of flat.",
             (RETURN, "    for x, view in zip(tensors, flat[:n].split([x.numel() for x in "
              f"tensors])):\n        x.data = view.view(x.shape)\n{RETURN}")),
        Slip("Leave the tensors as they are.",
             (RETURN, f"    for x in tensors:\n        x.zero_()\n{RETURN}")),
        Slip("flat has one dimension: don't return it as rows.",
             (RETURN, "    return flat.view(ranks, length), ")),
        Slip("Return both, (flat, shards).", (RETURN, "    return ")),
        Slip("flat is left over from an earlier call: make a new one inside the function.",
             ("(tensors, ranks):", "(tensors, ranks, flats={}):",
              f"flat = {ZEROS}", f"flat = flats.setdefault((n, ranks), {ZEROS})")),
    ), hints=(
        "How long is each shard if all have the same length and no number is lost? How long is "
        "flat then?",
        "length = ceil(n / R), which is -(-n // R). flat has length * R numbers: begin with zeros, "
        "and copy the tensors' numbers into its first n.",
        "torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat[:n]); "
        "flat.view(ranks, length).unbind() cuts it.",
    ))
