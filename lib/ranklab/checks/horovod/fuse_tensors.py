"""The check of fuse_tensors: which tensors share a buffer. Nothing is launched."""

import itertools

import torch

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import refuses

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
BRAIN, WHOLE = torch.bfloat16, torch.int32  # as many bytes as HALF and SINGLE
THRESHOLDS = (0, 39, 40, 79, 80, 81, 120, 400, 1000)
SIZES = (7, 9, 200, 3) * 5
ANOTHER = ("A tensor of another {0} between two does not close their list: keep the newest list of "
           "*each* (dtype, device) open, and count each of them separately.").format
# {what is in the list: (its tensors, what is wrong where all before is right)}
CASES = {
    "one dtype": ([(10, SINGLE)] * 27 + [(n, SINGLE) for n in SIZES], ""),
    "tensors that hold nothing": ([(n, SINGLE) for n in (0, 3, 0, 9) * 3], ""),
    "several dtypes": ([(10, HALF), (10, SINGLE)] * 6 + [(10, BRAIN), (10, WHOLE)] * 3
                       + [(5, DOUBLE), (3, SINGLE), (100, HALF)] * 7, ANOTHER("dtype")),
    "two devices": ([(10, SINGLE), (10, SINGLE, "meta")] * 3, ANOTHER("device")),
    "no tensor": ([], ""),
}
ORDER = ("Take the tensors as they come, without sorting them. Each joins the newest list of its "
         "kind, or begins a new one, which is the newest from then on. Nothing goes back into an "
         "older list.")


def plan(tensors, threshold, kind=lambda x: (x.dtype, x.device), size=lambda x: x.nbytes,
         fits=lambda sizes, threshold: sum(sizes) <= threshold):
    """The oracle: of each kind for itself, as many as fit; the last of `sizes` is that to add."""
    groups = []
    for each in dict.fromkeys(map(kind, tensors)):
        left = [i for i, tensor in enumerate(tensors) if kind(tensor) == each]
        while left:
            n = 1
            while n < len(left) and fits([size(tensors[i]) for i in left[:n + 1]], threshold):
                n += 1
            groups.append(left[:n])
            left = left[n:]
    return sorted(groups)


SLIPS = (  # (by which other rule a mistake plans, what it does, a hint)
    ({"size": torch.Tensor.numel}, "counts elements",
     "The threshold counts bytes: tensor.nbytes, not numel()."),
    ({"size": lambda x: len(x) * x.element_size()}, "counts the first dimension alone",
     "A tensor takes tensor.nbytes, whatever its shape."),
    ({"size": lambda x: x.untyped_storage().nbytes()}, "counts the memory behind a tensor",
     "Count tensor.nbytes, not the bytes of the memory that the tensor is a part of."),
    ({"kind": lambda x: x.dtype}, "puts two devices into one list",
     "A buffer lies on one device: kind = tensor.dtype, tensor.device."),
    ({"kind": lambda x: None}, "asks for no dtype", "A buffer is one tensor, so it has one dtype."),
    ({"kind": torch.Tensor.element_size}, "takes dtypes of one size for one dtype",
     "A buffer has one dtype: the kind is (dtype, device)."),
    ({"fits": lambda sizes, threshold: sum(sizes[:-1]) < threshold},
     "adds a tensor before it looks", "Look before you add: what does not fit begins a list."),
    ({"fits": lambda sizes, threshold: sum(sizes) < threshold}, "leaves the last byte empty",
     "What fills the buffer to its last byte still fits: compare with >, not with >=."),
    ({"fits": lambda sizes, threshold: sum(sizes[:-1]) > 0 and sum(sizes) <= threshold},
     "takes a list of no bytes for no list", "Ask whether there is a list, not how many bytes it "
     "holds."),
)


def check_fuse_tensors(fn):
    for name, (specs, hint) in CASES.items():
        # Matrices of one row that are parts of larger ones; on "meta" they have no memory.
        tensors = [torch.ones(2, n, dtype=dtype, device=(*device, "cpu")[0])[:1]
                   for n, dtype, *device in specs]
        plans = {threshold: _planned(fn, f"{name}, threshold {threshold} bytes", tensors, threshold)
                 for threshold in THRESHOLDS}
        if wrong := [each for each in THRESHOLDS if plans[each] != plan(tensors, each)]:
            raise _mistake(f"{name}, threshold {wrong[0]} bytes", plans, tensors, wrong[0], hint)
        yield f"{name}: in order, each list as full as can be, and no fuller"
    expect(refuses(fn, tensors, -1), "a threshold of -1 byte is accepted", "Raise a ValueError "
           "when it is negative: otherwise it goes on as if fusion were off.")
    yield "0 turns fusion off, a negative threshold is a ValueError; nothing is copied"


def _planned(fn, where, tensors, threshold):
    got = fn(given := list(tensors), threshold)
    is_list = isinstance(got, list) and all(isinstance(group, list) for group in got)
    expect(is_list, f"it returns {got}, not a list of lists", "Return [[0, 1], [2]] when tensors 0 "
           "and 1 share a buffer.")
    all_of = sum(got, [])
    for is_so, what, hint in (
        (all(isinstance(i, int) for i in all_of), "the lists do not hold positions",
         "A position is the number i of enumerate(tensors)."),
        ({*all_of} >= {*range(len(tensors))}, "a tensor is in no list",
         "Every list that was begun must be in the result, also the last one."),
        (len(all_of) <= len(tensors), "a tensor is in two lists", "It joins a list or begins one."),
        (all(group == sorted(group) for group in got), "a list is not in order", ORDER),
        ([*map(id, given)] == [*map(id, tensors)], "the list of tensors is changed", "Only plan."),
    ):
        expect(is_so, f"{where}: {what}", hint)
    return sorted(got)


def _mistake(where, plans, tensors, threshold, hint):
    """The Mistake whose rule gives these plans at all thresholds."""
    for rule, what, advice in SLIPS:
        if all(plans[each] == plan(tensors, each, **rule) for each in THRESHOLDS):
            return Mistake(f"{where}: it {what}", advice)
    got, right = plans[threshold], plan(tensors, threshold)
    one, due = next(pair for pair in itertools.zip_longest(got, right) if pair[0] != pair[1])
    return Mistake(f"{where}: {len(got)} lists, not {len(right)}; one is {one}, not {due}",
                   hint if len(got) > len(right) and hint else ORDER)
