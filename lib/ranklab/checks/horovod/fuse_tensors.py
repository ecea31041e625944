"""The check of fuse_tensors: which tensors share a buffer. Nothing is launched."""

import torch

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import refuses

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
BRAIN, WHOLE = torch.bfloat16, torch.int32  # as many bytes as HALF and SINGLE
SMALL_FIRST = [(10, SINGLE), (10, SINGLE), (10, SINGLE)]
MIXED = [(10, HALF), (10, SINGLE)] * 6
SIZES = [(7, SINGLE), (9, SINGLE), (200, SINGLE), (3, SINGLE)] * 5
NOTHING = [(0, SINGLE), (3, SINGLE), (0, SINGLE), (9, SINGLE)] * 3


def tensors_of(pairs):
    """[(elements, dtype), ...] -> tensors: matrices of one row, that are parts of larger ones."""
    return [torch.ones(2, n, dtype=dtype)[:1] for n, dtype in pairs]


def groups_of(pairs, threshold):
    """The oracle: each dtype for itself, with nothing but a list of sizes."""
    groups = []
    for dtype in {dtype: None for _, dtype in pairs}:
        left = [(i, n * dtype.itemsize) for i, (n, kind) in enumerate(pairs) if kind == dtype]
        while left:
            fits = 1
            while fits < len(left) and sum(size for _, size in left[:fits + 1]) <= threshold:
                fits += 1
            groups.append([i for i, _ in left[:fits]])
            left = left[fits:]
    return sorted(groups)


def check_fuse_tensors(fn):
    for pairs, threshold in ((SMALL_FIRST, 10**6), (SMALL_FIRST, 1), (MIXED, 10**6), ([], 10)):
        _is_a_plan(fn, pairs, threshold)
    yield "every tensor is in one list, by its position, in order"
    for pairs in (MIXED, [(10, HALF), (10, BRAIN), (10, SINGLE), (10, WHOLE)] * 3):
        for group in _plan(fn, pairs, 10**6):
            kinds = sorted({str(pairs[i][1]).removeprefix("torch.") for i in group})
            if len(kinds) > 1:
                raise Mistake(f"{' and '.join(kinds)} are in one list", "A buffer is one tensor, "
                              "so it has one dtype: keep a newest list for each (dtype, device).")
    yield "one dtype in each list"
    for pairs in (SMALL_FIRST * 9, SIZES):
        for threshold in (0, 39, 40, 79, 80, 81, 400):
            for group in _plan(fn, pairs, threshold):
                _within([pairs[i] for i in group], threshold)
    yield "no list is above the threshold, unless it is one tensor alone; 0 turns fusion off"
    for pairs in (SMALL_FIRST * 9, MIXED, [(5, DOUBLE), (3, SINGLE), (100, HALF)] * 7, SIZES,
                  NOTHING):
        for threshold in (40, 80, 120, 1000):
            _fullest(fn, pairs, threshold)
    yield "lists are filled in order, to the last byte, and past tensors of another dtype"
    _one_device(fn)
    yield "tensors of two devices share no list either"
    _refuses_below_0(fn)
    x = tensors_of(MIXED)
    fn(x, 100)
    if not all(bool((t == 1).all()) for t in x) or len(x) != len(MIXED):
        raise Mistake("the list of tensors, or a tensor, is changed",
                      "Only plan here: nothing is copied or cut.")
    yield "nothing is copied, the tensors are unchanged"


def _plan(fn, pairs, threshold):
    got = fn(tensors_of(pairs), threshold)
    if not isinstance(got, list) or not all(isinstance(group, list) for group in got):
        raise Mistake(f"it returns {type(got).__name__}, not a list of lists",
                      "Return [[0, 1], [2]] when tensors 0 and 1 share a buffer.")
    return got


def _is_a_plan(fn, pairs, threshold):
    got = _plan(fn, pairs, threshold)
    flat = [i for group in got for i in group]
    where = f"{len(pairs)} tensors, threshold {threshold} bytes: "
    if not all(isinstance(i, int) for i in flat):
        raise Mistake(f"{where}the lists hold {type(flat[0]).__name__}, not positions",
                      "A position is the number i of enumerate(tensors).")
    if missing := sorted(set(range(len(pairs))) - set(flat)):
        raise Mistake(f"{where}tensor {missing[0]} is in no list",
                      "Every list that was begun must be in the result, also the last one.")
    if len(flat) > len(pairs):
        raise Mistake(f"{where}a tensor is in two lists", "It joins a list or begins one.")
    if any(not group for group in got):
        raise Mistake(f"{where}there is an empty list",
                      "Begin a list only when there is a tensor to put into it.")
    if any(group != sorted(group) for group in got):
        raise Mistake(f"{where}a list is not in order: {got}", "Take the tensors as they come.")


def _within(group, threshold):
    sizes = [n * dtype.itemsize for n, dtype in group]
    if sum(sizes) <= threshold or len(sizes) == 1:
        return
    hint = ("Begin a new list when the next tensor does not fit. It takes tensor.nbytes, whatever "
            "its shape.")
    if sum(sizes[:-1]) < threshold:
        hint = ("Look before you add: a tensor that does not fit begins a new list. (Buckets of "
                "lab 03 close when they *have* reached their cap; this buffer has no more room.)")
    elif sum(n for n, _ in group) <= threshold:
        hint = "The threshold counts bytes: tensor.nbytes, not numel()."
    raise Mistake(f"a list holds {sum(sizes)} bytes, the threshold is {threshold}", hint)


def _fullest(fn, pairs, threshold):
    got, right = sorted(_plan(fn, pairs, threshold)), groups_of(pairs, threshold)
    if got == right:
        return
    kinds = {dtype for _, dtype in pairs}
    in_order = all(places == sorted(places) for places in  # lists by their first
                   ([i for group in got for i in group if pairs[i][1] == dtype] for dtype in kinds))
    where = f"{len(pairs)} tensors, threshold {threshold} bytes: "
    if not in_order or len(got) <= len(right):
        raise Mistake(f"{where}the lists are {got[:3]}..., not {right[:3]}...", "In order: take "
                      "the tensors as they come, without sorting them. Each joins the newest list "
                      "of its kind, or begins a new one, which is the newest from then on. Nothing "
                      "goes back into an older list.")
    hint = ("A tensor that fills the buffer to its last byte still fits: compare with >, not with "
            ">=. Take them in the order given, and of each only its own bytes, tensor.nbytes, not "
            "those of the memory that it is a part of.")
    if pairs == NOTHING:
        hint = ("Some of these tensors hold nothing, and join whatever list there is. Ask whether "
                "there is a list, not how many bytes it holds.")
    elif len(kinds) > 1:
        hint = ("A tensor of another dtype between two does not close their list: keep the newest "
                "list of *each* dtype open, and count its bytes by tensor.nbytes, each list for "
                "itself.")
    raise Mistake(f"{where}{len(got)} all-reduces, but {len(right)} are enough", hint)


def _one_device(fn):
    devices = ["cpu", "meta"] * 3  # meta: tensors without memory, a second device on any machine
    got = fn([torch.ones(10, device=name) for name in devices], 10**6)
    if any(len({devices[i] for i in group}) > 1 for group in got):
        raise Mistake("tensors of two devices are in one list",
                      "A buffer lies on one device: one dtype on one device in each list, so "
                      "kind = tensor.dtype, tensor.device.")
    if len(got) > 2:
        raise Mistake(f"three tensors on each of two devices: {len(got)} all-reduces, but 2 are "
                      "enough", "A tensor of another device between two does not close their list: "
                      "keep the newest list of *each* (dtype, device) open.")


def _refuses_below_0(fn):
    if not refuses(fn, tensors_of(SMALL_FIRST), -1):
        raise Mistake("a threshold of -1 byte is accepted", "Raise a ValueError when it is "
                      "negative: it would go on as if fusion were off, and nobody would see the "
                      "slip.")
