"""The check of assign_buckets: which parameters share a message, and in which order they leave."""

import operator

import torch
from torch import nn

from ranklab.checks.beside import expect, refused
from ranklab.checks.exercise import Mistake

KINDS = {"f": (torch.float32, "cpu"), "h": (torch.bfloat16, "cpu"), "m": (torch.float32, "meta")}
# numbers of elements, kinds, the cap in bytes; the right buckets, as places among the parameters
CASES = (
    ("three equal layers, one in each bucket", (10, 10, 10), "fff", 40, [[2], [1], [0]]),
    ("a weight and a bias, three times", (100, 10, 100, 10, 100, 10), "ffffff", 300,
     [[5, 4], [3, 2], [1, 0]]),
    ("the last bucket is not full", (4, 4, 4, 4, 4), "fffff", 32, [[4, 3], [2, 1], [0]]),
    ("one is larger than the cap", (3, 1000, 3), "fff", 40, [[2, 1], [0]]),
    ("all fit into one bucket", (5, 6, 7), "fff", 10**9, [[2, 1, 0]]),
    ("a cap of 1 byte", (5, 6, 7), "fff", 1, [[2], [1], [0]]),
    ("no parameters", (), "", 100, []),
    ("two types", (10, 10, 10, 10, 10), "fhfhf", 60, [[4, 2], [3, 1], [0]]),
    ("numbers of two bytes", (10, 10, 10, 10), "hhhh", 40, [[3, 2], [1, 0]]),
    ("two devices", (10, 10, 10, 10), "fmfm", 80, [[3, 1], [2, 0]]),
)
RULE = ("Torch's rule: put the parameter in, and then close the bucket if it has reached the cap. "
        "So a bucket may be larger than the cap, by its last parameter.")


def _one_type(sizes, cap, number, is_full=operator.ge, is_forward=False):
    """The places in each bucket, where all parameters are alike; `number`: bytes of an element."""
    buckets, places = [[]], list(range(len(sizes)))
    for place in places if is_forward else places[::-1]:
        if is_full(sum(number * sizes[each] for each in buckets[-1]), cap):
            buckets.append([])
        buckets[-1].append(place)
    return [bucket[::-1] for bucket in buckets[::-1]] if is_forward else buckets


SLIPS = {  # what _one_type gets by another rule
    "Begin with the last parameter: backward begins at the end of the model, so the last gradients "
    "are ready first.": {"is_forward": True},
    "A bucket that holds exactly the cap has reached it, and closes: compare with >=, not with >.":
        {"is_full": operator.gt},
    "The cap is in bytes, not in elements: parameter.nbytes.": {"number": 1},
    "A number in bfloat16 has two bytes, not four: parameter.nbytes counts them.": {"number": 4},
}


def check_assign_buckets(assign_buckets):
    for case, sizes, kinds, cap, right in CASES:
        parameters = [nn.Parameter(torch.zeros(n, dtype=KINDS[kind][0], device=KINDS[kind][1]))
                      for n, kind in zip(sizes, kinds)]
        buckets = _lists(assign_buckets, parameters, cap)
        places = {id(p): place for place, p in enumerate(parameters)}
        got = [[places.get(id(p)) for p in bucket] for bucket in buckets]
        if got != right:
            _explain(f"{case}: parameters of {[p.nbytes for p in parameters]} bytes, cap {cap}: "
                     f"the buckets are {got}; {right} is right", got, right, sizes, kinds, cap)
    yield "from the last parameter to the first; a bucket closes when it reaches the cap"
    yield "sizes are bytes; what is larger than the cap is not cut; the last one may be smaller"
    yield "one type on one device in each bucket; those that never reach the cap come last"
    refused("bucket_cap_bytes=0", lambda: assign_buckets([nn.Parameter(torch.zeros(3))], 0))()
    yield "a cap of 0 bytes is refused with a ValueError"


def _lists(assign_buckets, parameters, cap):
    try:
        buckets = assign_buckets((p for p in parameters), cap)
    except (TypeError, AttributeError) as error:
        raise Mistake(f"it raised {type(error).__name__}: {error}", "model.parameters() is no list "
                      "but a generator: it runs once. list(parameters) makes one.") from None
    expect(isinstance(buckets, list) and all(isinstance(each, list) for each in buckets),
           f"it returned {str(buckets)[:60]}", "Return a list of lists of parameters.")
    return buckets


def _explain(what, got, right, sizes, kinds, cap):
    there = sum(got, [])
    expect(None not in there, what, "Put the parameters themselves into the buckets.")
    for kind, names in (("h", "float32 and bfloat16"), ("m", "what lies on two devices")):
        mixed = [bucket for bucket in got if len({kinds[place] == kind for place in bucket}) > 1]
        expect(not mixed, f"{what}: a bucket holds {names}", "A bucket is one flat piece of "
               "memory: keep one open bucket for each (dtype, device).")
    missing = sorted({*range(len(sizes))} - {*there})
    expect(not missing, f"{what}: parameter {missing} is in no bucket", "What is open at the end "
           "counts too.")
    expect([] not in got, what, "There is an empty bucket: open one for something to put into it.")
    expect(sorted(got) != sorted(right), what, "First those that have reached the cap, in the "
           "order in which they did; then those still open, in the order in which they were "
           "opened. (A dict keeps the order of insertion: pop a bucket when it closes.)")
    expect(len({*kinds}) == 1, what, "Keep one open bucket for each (dtype, device), side by side: "
           "another type does not close a bucket, and each has its own total of bytes.")
    usual = {"number": KINDS[kinds[0]][0].itemsize}
    raise Mistake(what, next((hint for hint, rule in SLIPS.items()
                              if got == _one_type(sizes, cap, **usual | rule)), RULE))
