"""The check of assign_buckets: which parameters share a message, and in which order they leave."""

import torch
from torch import nn

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import refuses


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
FROM_THE_END = ("Begin with the last parameter: backward begins at the end of the model, so the "
                "last gradients are ready first. Go through them in reverse.")


def _parameters(sizes, kinds):
    return [nn.Parameter(torch.zeros(n, dtype=dtype, device=device))
            for n, (dtype, device) in zip(sizes, map(KINDS.get, kinds))]


def check_assign_buckets(assign_buckets):
    for case, sizes, kinds, cap, right in CASES:
        parameters = _parameters(sizes, kinds)
        buckets = _buckets(assign_buckets, parameters, cap)
        places = {id(p): place for place, p in enumerate(parameters)}
        got = [[places.get(id(p)) for p in bucket] for bucket in buckets]
        for what, kind in ("float32 and bfloat16", "dtype"), ("what lies on two devices", "device"):
            if any(len({getattr(p, kind) for p in bucket}) > 1 for bucket in buckets):
                raise Mistake(f"{case}: a bucket holds {what}", "A bucket is one flat piece of "
                              "memory: keep one open bucket for each (dtype, device).")
        if got != right:
            nbytes = ", ".join(str(p.nbytes) for p in parameters)
            raise Mistake(f"{case}: parameters of {nbytes} bytes, cap {cap}: the buckets are "
                          f"{got}; {right} is right", _bucket_hint(got, right, parameters, cap))
    yield "from the last parameter to the first; a bucket closes when it reaches the cap"
    yield "sizes are bytes; what is larger than the cap is not cut; the last one may be smaller"
    yield "one type on one device in each bucket; those that never reach the cap come last"
    if not refuses(assign_buckets, _parameters([3], "f"), 0):
        raise Mistake("bucket_cap_bytes=0 is accepted", "Say what is wrong: raise ValueError(...).")
    yield "a cap of 0 bytes is refused with a ValueError"


def _buckets(assign_buckets, parameters, cap):
    try:
        buckets = assign_buckets((p for p in parameters), cap)
    except (TypeError, AttributeError) as error:
        raise Mistake(f"it raised {type(error).__name__}: {error}", "model.parameters() is no list "
                      "but a generator: it has no length, and runs once. list(parameters) makes "
                      "one.") from None
    if not isinstance(buckets, list) or not all(isinstance(each, list) for each in buckets):
        raise Mistake(f"it returned {str(buckets)[:60]}", "Return a list of lists of parameters.")
    return buckets


def _filled(parameters, is_full, places=None):
    """The places in each bucket, in one type, by another rule; `places` is the way to go."""
    buckets = [[]]
    for place in reversed(range(len(parameters))) if places is None else places:
        if is_full([parameters[each] for each in buckets[-1]]):
            buckets.append([])
        buckets[-1].append(place)
    return buckets


def _nbytes(bucket):
    return sum(parameter.nbytes for parameter in bucket)


def _bucket_hint(got, right, parameters, cap):
    places = [place for bucket in got for place in bucket]
    wanted = {place for bucket in right for place in bucket}
    if None in places:
        return "Put the parameters themselves into the buckets."
    if missing := sorted(wanted - set(places)):
        return f"Parameter {missing[0]} is in no bucket: what is still open at the end counts too."
    if [] in got:
        return "There is an empty bucket: open one when there is something to put into it."
    if (places == sorted(places) and len(places) > 1
            or any(bucket != sorted(bucket, reverse=True) for bucket in got)
            or got == [bucket[::-1] for bucket in _filled(
                parameters, lambda b: _nbytes(b) >= cap, range(len(parameters)))][::-1]):
        return FROM_THE_END
    if got == _filled(parameters, lambda bucket: _nbytes(bucket) > cap):
        return (f"A bucket that holds exactly {cap} bytes has reached the cap, and closes: compare "
                "with >=, not with >.")
    if sorted(got) == sorted(right):
        return ("First those that have reached the cap, in the order in which they did; then those "
                "still open, in the order in which they were opened. (A dict keeps the order of "
                "insertion: pop a bucket when it closes.)")
    if len({p.dtype for p in parameters}) > 1:
        return ("Keep one open bucket for each (dtype, device), side by side: another type does "
                "not close a bucket, and each has its own total of bytes.")
    if {p.itemsize for p in parameters} == {2}:
        return "A number in bfloat16 has two bytes, not four: parameter.nbytes counts them."
    if got == _filled(parameters, lambda bucket: sum(p.numel() for p in bucket) >= cap):
        return "The cap is in bytes, not in elements: parameter.nbytes."
    return ("Torch's rule: put the parameter in, and then close the bucket if it has reached the "
            "cap. So a bucket may be larger than the cap, by its last parameter.")
