"""The check of assign_buckets: which parameters share a message, and in which order they leave."""

import torch
from torch import nn

from ranklab.checks.beside import expect, refused
from ranklab.checks.exercise import Mistake

KINDS = {"f": (torch.float32, "cpu"), "h": (torch.bfloat16, "cpu"), "m": (torch.float32, "meta")}
# numbers of elements, kinds, the cap in bytes; the right buckets, as indices of parameters
CASES = (
    ("three equal layers, one in each bucket", (10, 10, 10), "fff", 40, [[2], [1], [0]]),
    ("a weight and a bias, three times", (100, 10, 100, 10, 100, 10), "ffffff", 300,
     [[5, 4], [3, 2], [1, 0]]),
    ("the last bucket is not full", (4, 4, 4, 4, 4), "fffff", 32, [[4, 3], [2, 1], [0]]),
    ("one is larger than the cap", (3, 1000, 3), "fff", 40, [[2, 1], [0]]),
    ("no parameters", (), "", 100, []),
    ("two types", (10, 10, 10, 10, 10), "fhfhf", 60, [[4, 2], [3, 1], [0]]),
    ("numbers of two bytes", (10, 10, 10, 10), "hhhh", 40, [[3, 2], [1, 0]]),
    ("two devices", (10, 10, 10, 10), "fmfm", 80, [[3, 1], [2, 0]]),
)
SLIPS = {  # what usual mistakes get
    ("a weight and a bias, three times", "[[5], [4, 3], [2, 1], [0]]"): "Begin with the last "
    "parameter: backward begins at the end of the model, so the last gradients are ready first.",
    ("three equal layers, one in each bucket", "[[2, 1], [0]]"): "A bucket that holds exactly the "
    "cap has reached it, and closes: compare with >=, not with >.",
    ("three equal layers, one in each bucket", "[[2, 1, 0]]"): "The cap is in bytes, not in "
    "elements: parameter.nbytes.",
    ("numbers of two bytes", "[[3], [2], [1], [0]]"): "A number in bfloat16 has two bytes, not "
    "four: parameter.nbytes counts them.",
}


def check_assign_buckets(assign_buckets):
    for case, sizes, kinds, cap, right in CASES:
        parameters = [nn.Parameter(torch.zeros(n, dtype=KINDS[kind][0], device=KINDS[kind][1]))
                      for n, kind in zip(sizes, kinds)]
        buckets = _lists(assign_buckets, parameters, cap)
        indices = {id(p): index for index, p in enumerate(parameters)}
        got = [[indices.get(id(p)) for p in bucket] for bucket in buckets]
        what = (f"{case}: parameters of {[p.nbytes for p in parameters]} bytes, cap {cap}: the "
                f"buckets are {got}; {right} is right")
        expect(got == right, what, SLIPS.get((case, str(got))) or _hint(got, right, kinds))
    yield "from the last parameter to the first; a bucket closes when it reaches the cap"
    yield "sizes are bytes; what is larger than the cap is not cut; the last one may be smaller"
    yield "one type on one device in each bucket; those that never reach the cap come last"
    refused("bucket_cap_bytes=0", lambda: assign_buckets([nn.Parameter(torch.zeros(3))], 0))()
    yield "a cap of 0 bytes is refused with a ValueError"


def _lists(assign_buckets, parameters, cap):
    try:
        buckets = assign_buckets((p for p in parameters), cap)
    except (TypeError, AttributeError) as error:
        hint = "It is no list but a generator: list(parameters)." * ("generator" in str(error))
        raise Mistake(f"it raised {type(error).__name__}: {error}", hint) from None
    expect(isinstance(buckets, list) and all(isinstance(each, list) for each in buckets),
           f"it returned {str(buckets)[:60]}", "Return a list of lists of parameters.")
    return buckets


def _hint(got, right, kinds):
    """The first that is true of `got`, which is not `right`."""
    there = sum(got, [])
    mixed = [{kinds[index] for index in bucket if index is not None} for bucket in got]
    return next(hint for is_so, hint in (
        (None in there, "Put the parameters themselves into the buckets."),
        ({*"fh"} in mixed, "A bucket holds float32 and bfloat16; it is one flat piece of memory: "
         "keep one open bucket for each (dtype, device)."),
        ({*"fm"} in mixed, "A bucket holds what lies on two devices: keep one open bucket for each "
         "(dtype, device)."),
        ({*there} != {*range(len(kinds))}, "A parameter is in no bucket: what is open at the end "
         "counts too."),
        ([] in got, "There is an empty bucket: open one for something to put into it."),
        (sorted(got) == sorted(right), "First those that have reached the cap, in the order in "
         "which they did; then those still open, in the order in which they were opened."),
        (len({*kinds}) > 1, "Keep one open bucket for each (dtype, device), side by side: another "
         "type does not close a bucket, and each has its own total of bytes."),
        (True, "Torch's rule: put the parameter in, and then close the bucket if it has reached "
         "the cap. So a bucket may be larger than the cap, by its last parameter.")) if is_so)
