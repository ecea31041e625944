"""The check of silent_corruption: bits that differ on some ranks, and which ranks are right."""

from collections import Counter
from functools import partial

import torch

from ranklab.checks.beside import GROUP, expect, located, on_groups
from ranklab.checks.exercise import Mistake
from ranklab.checks.handles import uses
from ranklab.engine import device
from ranklab.meter import Traffic

FAILURES = {
    "RuntimeError: .*invalid output tensor list.*": f"The list needs a tensor for each rank of "
    f"the group. {GROUP}",
    "TypeError: Got unsupported ScalarType BFloat16": "numpy has no bfloat16: take the bytes, "
    "by .view(torch.uint8).",
    "RuntimeError: .*(self.dim\\(\\) cannot be 0|self.stride\\(-1\\) must be 1|view size is not).*":
        "A parameter may have no dimension, or be strided: .contiguous().view(-1) first.",
    "(OverflowError|RuntimeError|ValueError): .*([Oo]verflow|too large).*": "8 bytes as an int64 "
    'need a sign: int.from_bytes(digest, "big", signed=True).',
}


def _parameters():
    """Of many types and shapes; the NaN is the same on all ranks."""
    random = torch.Generator().manual_seed(0)
    w, flat = torch.randn(30, 10, generator=random), torch.arange(24.0)
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


# name: (the members that change, as numbers in the group; the parameter; the change; a hint)
BITS = "Hash the bytes of each parameter. Sums and norms round such a change away, or miss it."
CHANGES = {
    "nothing": ((), "half", _flip, "All bits are equal, NaN's too: compare bytes, not numbers."),
    "the lowest bit of a weight": ((1,), "layer.weight", partial(_flip, bit=0), BITS),
    "its very last number": ((2,), "layer.weight", partial(_flip, at=-1), "Hash all of it."),
    "one of a mask": ((2,), "mask", partial(_flip, at=1), BITS),
    "the highest bit, on the group's first": ((0,), "layer.bias", partial(_flip, bit=31), "The "
                                              "first may be the wrong one: take the majority."),
    "a bit of bfloat16": ((2,), "half", _flip, BITS),
    "the last bit of a float64": ((3,), "precise", _flip, "In float32 a float64 loses half of its "
                                  "bits: hash the bytes as they are."),
    "-0.0 for 0.0": ((1,), "layer.weight", lambda w: w[0].mul_(0).neg_(), BITS),
    "another NaN": ((1,), "layer.weight", partial(_flip, at=33, bit=3), "NaN has many bits: hash "
                    "the bytes."),
    "two numbers in each other's place": ((2,), "layer.bias", _swap, "A hash must depend on the "
                                          "order: a sum of bits does not."),
    "a scale without dimensions": ((1,), "scale", partial(_flip, at=0), BITS),
    "a whole number": ((2,), "steps", partial(_flip, at=3), BITS),
    "the same bit on two": ((0, 1), "strided", lambda w: w[2].add_(1), "Two of four are no "
                            "majority: [] says that nobody knows. Of three, two are."),
}


def _of(member, case):
    parameters = _parameters()
    if case == "three different ones":
        parameters["layer.bias"][0] += member % 3  # of four, two are alike: no majority
        parameters["steps"][0] += member > 0
    elif case == "two parameters on two":
        _flip(parameters["layer.weight"]) if member == 1 else None
        _flip(parameters["precise"]) if member == 2 else None
    elif member in CHANGES[case][0]:
        CHANGES[case][2](parameters[CHANGES[case][1]])
    return parameters


def _right(size, case):
    """By the bytes of all members, side by side."""
    found, all_of = {}, [_of(member, case) for member in range(size)]
    for name in all_of[0]:
        row = [bytes(p[name].contiguous().view(-1).view(torch.uint8).tolist()) for p in all_of]
        usual, times = Counter(row).most_common(1)[0]
        if times < size:
            found[name] = [i for i in range(size) if 2 * times > size and row[i] != usual]
    return found


MORE = {"three different ones": "More than half must be equal. If not, return []: nobody knows.",
        "two parameters on two": "Each parameter has a majority of its own."}


def _trial(silent_corruption, ranks):
    for case, hint in ({name: hint for name, (*_, hint) in CHANGES.items()} | MORE).items():
        given = {name: p.to(device()).requires_grad_(p.is_floating_point())
                 for name, p in _of(ranks.index, case).items()}
        before = {name: p.detach().clone() for name, p in given.items()}
        with Traffic() as traffic:
            found = silent_corruption(given, **ranks.keywords)
        kept = all(torch.equal(p.detach().nan_to_num(), before[name].nan_to_num())
                   for name, p in given.items())
        yield partial(located, f"{ranks}, {case}", _look, found, _right(ranks.size, case), hint,
                      [op.payload_bytes // ranks.size for op in traffic.ops], kept)


def _look(found, right, hint, sent, kept):
    least = 8 * len(_parameters())
    expect(isinstance(found, dict), f"it returns {found!r}", "Return {name: [rank, ...]}.")
    expect(kept, "a parameter has changed", "Only read the parameters.")
    expect(sum(sent) <= least, f"a rank gives {sum(sent):,} bytes to collectives; {least} are "
           "enough", "Send a hash of 8 bytes for each parameter. The tensors stay where they are.")
    expect(len(sent) <= 1, f"{len(sent)} collectives; one is enough", "Put all hashes into one "
           "tensor of int64: one all-gather.")
    for name in sorted(right.keys() ^ found.keys()):
        raise Mistake(f"{name} differs, and is not named", hint) if name in right else Mistake(
            f"{name} is named, and does not differ")
    for name, due in right.items():
        expect(found[name] == due, f"{name}: {found[name]}, not {due}", f"{hint} List the "
               "ranks outside the majority, numbered inside the group; [] if no more than half "
               "are equal.")


def check_silent_corruption(silent_corruption):
    expect(not uses(silent_corruption, "hash"), "it calls hash()", "hash() of bytes is different "
           "in each process (PYTHONHASHSEED), unless it was forked, as here: take hashlib.")
    on_groups(_trial, silent_corruption, failures=FAILURES)
    yield "any bit of any type names its parameter and rank, also the first; NaN counts by its bits"
    yield "[] without a majority, as with two ranks: nobody knows; on 4, 3, 2 and 1 ranks"
    yield "one all-gather of 8 bytes a parameter; the parameters are unchanged"
