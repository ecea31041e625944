"""silent_corruption: bits that differ on some ranks, and which ranks are right."""

import hashlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.prover import ALL, GROUPS, AtMost, Must, Proof, Slip, Stage
from ranklab.engine import device
from ranklab.meter import Traffic
from ranklab.resilience import silent_corruption

BYTES = 8  # of a hash


def _parameters():
    """Return parameters of many types and shapes; the NaN is the same on all ranks."""
    # Without randn(), whose last bits follow from the CPU's kernels.
    w, flat = torch.arange(300) * 2654435761 % 2**20 / 2**18 - 2, torch.arange(24.0)
    w = w.view(30, 10)
    w[3, 3], w[0, 0], w[1] = float("nan"), 0.0, 0.5
    return {"layer.weight": w, "layer.bias": flat[:10], "half": w[2].bfloat16().clone(),
            "precise": w[4].double(), "strided": w[:6].clone().t(), "scale": torch.tensor(2.0),
            "steps": torch.arange(5) + 2**60, "mask": torch.ones(3, dtype=torch.bool),
            "none": torch.zeros(0, 3), "beside": flat[10:]}


def _flip(tensor, at=7, bit=0):
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    tensor.view(-1).view(whole)[at] ^= 1 << bit


def _swap(tensor):
    tensor[0], tensor[5] = tensor[5].item(), tensor[0].item()


class Change(NamedTuple):
    """A change on some members of the group, given by their numbers in it."""

    name: str
    members: tuple
    parameter: str
    change: Callable

    def __str__(self):
        return self.name

    def parameters_of(self, member):
        parameters = _parameters()
        if member in self.members:
            self.change(parameters[self.parameter])
        return parameters


class Three(NamedTuple):
    """Two of four ranks are equal, which is no majority."""

    def __str__(self):
        return "three different ones"

    def parameters_of(self, member):
        parameters = _parameters()
        parameters["layer.bias"][0] += member % 3
        parameters["steps"][0] += member > 0
        return parameters


class Two(NamedTuple):
    """Each parameter has a majority of its own."""

    def __str__(self):
        return "two parameters on two ranks"

    def parameters_of(self, member):
        parameters = _parameters()
        if member in (1, 2):
            _flip(parameters[("layer.weight", "precise")[member - 1]])
        return parameters


def _see(fn, case, ranks):
    parameters = {name: tensor.to(device()).requires_grad_(tensor.is_floating_point())
                  for name, tensor in case.parameters_of(ranks.index).items()}
    before = {name: _content(tensor) for name, tensor in parameters.items()}
    with Traffic() as traffic:
        corrupt = fn(parameters, **ranks.keywords)
    yield {
        "what it returns": Must(corrupt, _right(case, ranks.size)),
        "parameters that have changed": Must(
            [name for name, tensor in parameters.items() if _content(tensor) != before[name]], []),
        "collectives": AtMost(len(traffic.ops), 1),
        "bytes that a rank gives to collectives": AtMost(
            sum(op.payload_bytes // ranks.size for op in traffic.ops), BYTES * len(parameters)),
        "calls of hash()": Must(_uses(fn, "hash"), False),
    }


def _uses(fn, name):
    """Return whether the code of the function, or of a function inside it, mentions `name`."""
    codes = [code for code in [getattr(fn, "__code__", None)] if code]
    for code in codes:
        codes += [const for const in code.co_consts if hasattr(const, "co_names")]
    return any(name in code.co_names for code in codes)


def _content(tensor):
    return bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist())


def _right(case, size):
    """Return the right answer, by comparing the bytes of all members."""
    right, members = {}, [case.parameters_of(member) for member in range(size)]
    for name in members[0]:
        row = [_content(parameters[name]) for parameters in members]
        usual, times = Counter(row).most_common(1)[0]
        if times < size:
            right[name] = [i for i in range(size) if 2 * times > size and row[i] != usual]
    return right


def sums(parameters, group=None, dtype=torch.float64):
    own = torch.stack([p.detach().double().sum() for p in parameters.values()])
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, own, group=group)
    return _majorities(parameters, torch.stack(rows, 1).view(dtype).tolist())


def bits_of_sums(parameters, group=None):
    """Compare the bits of sums: NaN differs from any NaN as a number, but not in its bits."""
    return sums(parameters, group, torch.int64)


def sends_all(parameters, group=None):
    rows = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, [_content(p) for p in parameters.values()], group=group)
    return _majorities(parameters, zip(*rows))


def one_by_one(parameters, group=None):
    columns = []
    for p in parameters.values():
        mark = int.from_bytes(hashlib.sha256(_content(p)).digest()[:7], "big")
        own = torch.tensor([mark], device=device())
        rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, own, group=group)
        columns.append([int(row) for row in rows])
    return _majorities(parameters, columns)


def _majorities(names, columns):
    corrupt = {}
    for name, column in zip(names, columns):
        usual, times = Counter(column).most_common(1)[0]
        if times < len(column):
            corrupt[name] = [i for i, mark in enumerate(column)
                             if mark != usual and 2 * times > len(column)]
    return corrupt


CHANGES = (
    Change("nothing differs", (), "half", _flip),
    Change("the lowest bit of a weight on one rank", (1,), "layer.weight", _flip),
    Change("the very last number of a weight", (2,), "layer.weight", partial(_flip, at=-1)),
    Change("one of a mask", (2,), "mask", partial(_flip, at=1)),
    Change("the highest bit, on the group's first rank", (0,), "layer.bias",
           partial(_flip, bit=31)),
    Change("a bit of bfloat16", (2,), "half", _flip),
    Change("the last bit of a float64", (3,), "precise", _flip),
    Change("-0.0 for 0.0", (1,), "layer.weight", lambda w: w[0, 0].neg_()),
    Change("another NaN", (1,), "layer.weight", partial(_flip, at=33, bit=3)),
    Change("two numbers have changed places", (2,), "layer.bias", _swap),
    Change("a scale without dimensions", (1,), "scale", partial(_flip, at=0)),
    Change("a whole number", (2,), "steps", partial(_flip, at=3)),
    Change("the same bit on two ranks", (0, 1), "strided", lambda w: w[2].add_(1)),
    Three(), Two(),
)
CONTENT = "tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()"
MARK = 'marks.append(int.from_bytes(digest, "big", signed=True))'
USUAL = "usual, times = Counter(column).most_common(1)[0]"
MAJORITY = "deviants if 2 * times > len(column) else []"
GATHER = "dist.all_gather(rows, row, group=group)"
BITS = ("Hash the bytes of each parameter: sums and norms miss some changes, and NaN never equals "
        "NaN.")
ALL_BITS = "Compare bytes, not numbers: -0.0 equals 0.0, and NaN has many bit patterns."
NARROW = ("Converting to another dtype loses bits: hash the bytes as they are, with "
          ".view(torch.uint8).")
NOBODY = ("More than half of the ranks must agree: two of four, or one of two, are not enough. "
          "Otherwise the list is [], because the right rank is unknown.")
CORRUPTION = Proof(
    silent_corruption,
    Stage({"any flipped bit, of any type, gives its parameter and rank, also the first; NaN counts "
           "by its bits; [] without a majority, as with two ranks; on 4, 3, 2 and 1 ranks":
           (), "one all-gather of 8 bytes a parameter; the parameters are unchanged": (
               "parameters that have changed", "collectives",
               "bytes that a rank gives to collectives", "calls of hash()")},
          _see, CHANGES, (4,), (ALL, *GROUPS)),
    mistakes=(
        Slip("The group's first rank can be the corrupt one: compare with the majority.",
             (USUAL, "usual, times = column[0], column.count(column[0])"),
             (USUAL, "usual, times = column[0], column.count(column[0])", MAJORITY, "deviants")),
        Slip(NOBODY, (MAJORITY, "deviants"), (MAJORITY, "deviants if 2 * times >= len(column) else "
                                              "[]"),
             (MAJORITY, "deviants if len(column) > 2 else []")),
        Slip("Name the parameter even if the right rank is unknown: its list is then [].",
             ("        if times < len(column):\n", "        if len(column) > 2 * (len(column) - "
              "times) > 0:\n")),
        Slip("The list names the ranks outside the majority, not those in it.",
             ("if mark != usual", "if mark == usual")),
        Slip("Leave out a parameter whose bits are equal on all ranks.",
             ("        if times < len(column):\n", "        if True:\n")),
        Slip(NARROW, (CONTENT, CONTENT.replace("detach()", "detach().float()")),
             (CONTENT, CONTENT.replace("detach()", "detach().double()"))),
        Slip(ALL_BITS, (CONTENT, CONTENT.replace(
            "tensor.detach()", "(tensor.detach() + 0).nan_to_num()")),
             (CONTENT, CONTENT.replace("tensor.detach()", "(tensor.detach() + 0)")),
             (CONTENT, CONTENT.replace("tensor.detach()", "tensor.detach().nan_to_num()"))),
        Slip("NumPy has no bfloat16: take the bytes with .view(torch.uint8).",
             (CONTENT, CONTENT.replace(".view(torch.uint8)", ""))),
        Slip("A parameter can be strided, with bytes that are not adjacent in memory: call "
             ".contiguous() first.", (CONTENT, CONTENT.replace(".contiguous()", ""))),
        Slip("A parameter can have no dimensions: call .view(-1) before .view(torch.uint8).",
             (CONTENT, CONTENT.replace(".view(-1)", ""))),
        Slip("Numbers have 1, 2, 4 or 8 bytes: only .view(torch.uint8) works for all of them.",
             (CONTENT, CONTENT.replace("uint8", "int16"))),
        Slip("Hash the whole parameter, down to its last number.", (CONTENT, f"{CONTENT}[:1024]"),
             (CONTENT, f"{CONTENT}[:-4]")),
        Slip("A parameter can be part of a larger tensor: hash its own bytes, not the whole "
             "storage.", (CONTENT, "torch.empty(0, dtype=torch.uint8).set_(tensor.detach().cpu()"
                          ".untyped_storage()).numpy()")),
        Slip("A hash must depend on the order of the bytes: their sum does not.",
             (MARK, "marks.append(int(content.astype('int64').sum()))")),
        Slip('This number does not fit into int64: take 8 bytes of the hash, '
             'int.from_bytes(digest, "big", signed=True).',
             (MARK, MARK.replace(", signed=True", ""))),
        Slip("hash() of bytes differs between processes (PYTHONHASHSEED), unless they are forked, "
             "as here: use hashlib.", (MARK, "marks.append(hash(content.tobytes()))")),
        Slip("Even a whole byte of a hash is equal by chance once in 256 times: send 8 bytes.",
             (MARK, "marks.append(digest[0] % 4)")),
        Slip("Pass `group` on to every collective, and to get_world_size.",
             ("dist.get_world_size(group))]", "dist.get_world_size())]"),
             (GATHER, "dist.all_gather(rows, row)"),
             (GATHER, "dist.all_gather(rows, row)", "get_world_size(group)", "get_world_size()")),
        Slip("Ranks are numbered inside the group.",
             ("deviants = [rank for", "deviants = [dist.get_process_group_ranks(group)[rank] for")),
        Slip("All ranks must return the same result: look at all the gathered hashes, not only at "
             "your own.",
             ("deviants = [rank for rank, mark in enumerate(column) if mark != usual]",
              "deviants = [dist.get_rank(group)] if usual != column[dist.get_rank(group)] else "
              "[]")),
        Slip("Do not change the parameters.", (GATHER, f"{GATHER}\n    for tensor in "
                                           "parameters.values():\n        "
                                           "tensor.detach().zero_()")),
        Slip(BITS, sums, bits_of_sums),
        Slip("Send an 8-byte hash of each parameter. The tensors stay where they are.",
             sends_all),
        Slip("One all-gather is enough: put all hashes into one int64 tensor.", one_by_one),
    ), hints=(
        "Which few bytes change when any bit of a parameter changes?",
        "Take an 8-byte hash of each parameter, and send all hashes in one all-gather. In each "
        "column, the most frequent hash is right if more than half of the ranks have it.",
        "tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy() into "
        "hashlib.blake2b(..., digest_size=8); int.from_bytes(..., 'big', signed=True); "
        "Counter(column).most_common(1)",
    ))
