"""The check of assign_buckets: which parameters share a message, and in which order they leave."""

from typing import NamedTuple

import torch
from torch import nn

from ranklab.checks.prover import Must, Proof, Slip, Stage, must_refuse
from ranklab.data_parallel import assign_buckets

KINDS = {"f": (torch.float32, "cpu"), "h": (torch.bfloat16, "cpu"), "g": (torch.float16, "cpu"),
         "m": (torch.float32, "meta")}


class Case(NamedTuple):
    """kinds: a letter for each parameter; right: its buckets, as indices of parameters."""

    name: str
    sizes: tuple
    kinds: str
    cap: int
    right: list

    def parameters(self):
        return [nn.Parameter(torch.zeros(n, dtype=KINDS[kind][0], device=KINDS[kind][1]))
                for n, kind in zip(self.sizes, self.kinds)]

    def __str__(self):
        nbytes = [p.nbytes for p in self.parameters()]
        return f"{self.name}, parameters of {nbytes} bytes, cap {self.cap}"


CASES = (
    Case("three equal layers, one in each bucket", (10, 10, 10), "fff", 40, [[2], [1], [0]]),
    Case("a weight and a bias, three times", (100, 10, 100, 10, 100, 10), "ffffff", 300,
         [[5, 4], [3, 2], [1, 0]]),
    Case("the last bucket is not full", (4, 4, 4, 4, 4), "fffff", 32, [[4, 3], [2, 1], [0]]),
    Case("one is larger than the cap", (3, 1000, 3), "fff", 40, [[2, 1], [0]]),
    Case("no parameters", (), "", 100, []),
    Case("two types", (10, 10, 10, 10, 10), "fhfhf", 60, [[4, 2], [3, 1], [0]]),
    Case("numbers of two bytes", (10, 10, 10, 10), "hhhh", 40, [[3, 2], [1, 0]]),
    Case("two types of two bytes", (10, 10, 10, 10), "hghg", 40, [[3, 1], [2, 0]]),
    Case("two devices", (10, 10, 10, 10), "fmfm", 80, [[3, 1], [2, 0]]),
    Case("a type whose bucket is never full", (10, 2, 10, 10), "fhff", 40, [[3], [2], [0], [1]]),
    Case("two types whose buckets are never full", (2, 10, 2), "hfh", 60, [[2, 0], [1]]),
    Case("large ones", (2**19,) * 4, "mmmm", 2**22, [[3, 2], [1, 0]]),
)


def _see(fn, case):
    parameters = case.parameters()
    indices = {id(p): index for index, p in enumerate(parameters)}
    yield {"the result, as indices of parameters,": Must(
        _as_indices(fn((p for p in parameters), case.cap), indices), case.right)}
    again = [*parameters]
    fn(again, case.cap)
    yield {"the list of parameters afterwards": Must([indices[id(p)] for p in again],
                                                     [*range(len(parameters))])}


def _as_indices(buckets, indices):
    if not isinstance(buckets, list):
        return f"a {type(buckets).__name__}"
    if not all(isinstance(bucket, list) for bucket in buckets):
        return f"a list of {', '.join(sorted({type(each).__name__ for each in buckets}))}"
    return [[indices.get(id(p), f"a {type(p).__name__}") for p in bucket] for bucket in buckets]


def _see_refusal(fn, cap):
    yield {"what it raises": must_refuse(fn, [nn.Parameter(torch.zeros(3))], cap)}


BACKWARDS, KIND = "reversed(list(parameters))", "parameter.dtype, parameter.device"
OPEN_ONES, NBYTES = "list(still_open.values())", "sum(p.nbytes for p in bucket)"
OPENS = "bucket = still_open.setdefault(kind, [])"
CLOSES = "closed.append(still_open.pop(kind))"
BUCKETS = Proof(
    assign_buckets,
    Stage({"from the last parameter to the first; a bucket closes when it reaches the cap": (),
           "sizes are bytes; what is larger than the cap is not cut; the last one may be smaller":
           (),
           "one type on one device in each bucket; those that never reach the cap come last": ()},
          _see, CASES),
    Stage("a cap of 0 bytes is refused with a ValueError", _see_refusal, (0,),
          note=("Report the problem at once: raise ValueError(...) with the numbers in its "
                "message.")),
    mistakes=(
        Slip("float16 and bfloat16 are different dtypes, even though both take two bytes.",
             (KIND, "parameter.dtype.itemsize, parameter.device")),
        Slip("You reversed the caller's list: reversed() leaves it as it is.",
             (BACKWARDS, f"(parameters.reverse() or [*parameters]) if isinstance(parameters, list) "
              f"else {BACKWARDS}")),
        Slip("Begin with the last parameter: backward begins at the end of the model, so the last "
             "gradients are ready first.", (BACKWARDS, "parameters")),
        Slip("Fill the buckets starting from the last parameter: reversing the finished buckets is "
             "not enough.", (BACKWARDS, "parameters", f"closed + {OPEN_ONES}",
                                  f"[bucket[::-1] for bucket in (closed + {OPEN_ONES})[::-1]]")),
        Slip("A bucket that holds exactly the cap has reached it and closes: compare with >=, not "
             ">.", (">= bucket_cap_bytes", "> bucket_cap_bytes")),
        Slip("As in torch, add the parameter first, then close the bucket if it has reached the "
             "cap. So the last parameter can take a bucket over the cap.",
             (">= bucket_cap_bytes:", "> bucket_cap_bytes and bucket[1:]:", CLOSES,
              "closed.append(still_open[kind][:-1])\n            still_open[kind] = [parameter]")),
        Slip("A parameter that is larger than the cap goes into the open bucket, like any other.",
             ("        bucket.append(parameter)\n",
              "        if parameter.nbytes > bucket_cap_bytes:\n            "
              "closed.append([parameter])\n            continue\n"
              "        bucket.append(parameter)\n")),
        Slip("This bucket keeps growing after its bytes have reached the cap: close it then. The "
             "cap is already in bytes.",
             (">= bucket_cap_bytes:", ">= 1024 * bucket_cap_bytes:"),
             (f"if {NBYTES} >= bucket_cap_bytes:", "if False:")),
        Slip("All buckets have the same cap. (Torch closes its first one at 1 MiB, which is not "
             "asked for here.)",
             (">= bucket_cap_bytes:",
              ">= (bucket_cap_bytes if closed else min(2**20, bucket_cap_bytes)):")),
        Slip("The cap is in bytes, not in elements: use parameter.nbytes.",
             ("p.nbytes", "p.numel()")),
        Slip("A bfloat16 element takes two bytes, not four: use parameter.nbytes.",
             ("p.nbytes", "4 * p.numel()")),
        Slip("This bucket mixes float32 and bfloat16, but it is one flat piece of memory: keep one "
             "open bucket for each (dtype, device).", (KIND, "None"), (KIND, "parameter.device")),
        Slip("This bucket mixes two devices: keep one open bucket for each (dtype, device).",
             (KIND, "parameter.dtype")),
        Slip("A parameter of another dtype does not close a bucket: keep one open bucket for each "
             "(dtype, device) at the same time.",
             (OPENS, "if still_open and kind not in still_open:\n            "
              f"closed.append(still_open.popitem()[1])\n        {OPENS}")),
        Slip("Count the bytes of each open bucket separately.",
             (NBYTES, "sum(p.nbytes for each in still_open.values() for p in each)")),
        Slip("A parameter is in no bucket: buckets still open at the end count as well.",
             (f" + {OPEN_ONES}", "")),
        Slip("There is an empty bucket: open a bucket only when there is a parameter to put into "
             "it.",
             (OPEN_ONES, f"({OPEN_ONES} or [[]])"), (OPEN_ONES, f"({OPEN_ONES} + [[]])")),
        Slip("Buckets that have reached the cap come first; those still open come last.",
             (f"closed + {OPEN_ONES}", f"{OPEN_ONES} + closed")),
        Slip("The buckets still open come in the order in which they were opened.",
             (OPEN_ONES, f"{OPEN_ONES}[::-1]")),
        Slip("`parameters` is a generator here, not a list: use list(parameters).",
             (BACKWARDS, "parameters[::-1]"), (BACKWARDS, "reversed(parameters)")),
        Slip("Put the parameters themselves into the buckets.",
             ("bucket.append(parameter)", "bucket.append(parameter.detach())")),
        Slip("Return a list of lists of parameters.",
             ("return closed", "yield from closed"),
             (f"closed + {OPEN_ONES}", f"[*map(tuple, closed + {OPEN_ONES})]")),
        Slip("Keep the check of bucket_cap_bytes, which raises a ValueError.",
             ("bucket_cap_bytes < 1", "False"), ("bucket_cap_bytes < 1", "bucket_cap_bytes < 0")),
    ), hints=(
        "Go through the parameters once, from the last to the first. Which bucket does each go "
        "into, and when do you close that bucket?",
        "Keep a dict with the open bucket for each (dtype, device). Add the parameter, and once "
        "the bucket's bytes reach the cap, move the bucket to the closed ones.",
        "bucket = still_open.setdefault(kind, []); bucket.append(parameter); if sum(p.nbytes "
        "for p in bucket) >= bucket_cap_bytes: closed.append(still_open.pop(kind)). At the end: "
        "closed + list(still_open.values())",
    ))
