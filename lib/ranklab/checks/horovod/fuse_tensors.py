"""The check of fuse_tensors: which tensors share a buffer. Nothing is launched."""

import itertools
from typing import NamedTuple

import torch

from ranklab.checks.prover import Must, Proof, Slip, Stage, Told, must_refuse
from ranklab.horovod import fuse_tensors

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
BRAIN, WHOLE = torch.bfloat16, torch.int32  # as many bytes as HALF and SINGLE
THRESHOLDS = 40, 80, 79, 81, 39, 0, 120, 400, 1000
SIZES = (7, 9, 200, 3) * 5


class Case(NamedTuple):
    """specs: for each tensor its elements, dtype and perhaps device."""

    name: str
    specs: tuple
    threshold: int

    def __str__(self):
        return f"{self.name}, threshold {self.threshold} bytes"

    def tensors(self):
        """Return one-row matrices that are parts of larger ones; on "meta" without memory."""
        return [torch.ones(2, n, dtype=dtype, device=(*device, "cpu")[0])[:1]
                for n, dtype, *device in self.specs]


def _cases(**specs_of):
    return tuple(Case(name.replace("_", " "), tuple(specs), threshold)
                 for name, specs in specs_of.items() for threshold in THRESHOLDS)


ONE_DTYPE = _cases(
    one_dtype=[(10, SINGLE)] * 27 + [(n, SINGLE) for n in SIZES],
    tensors_that_hold_nothing=[(n, SINGLE) for n in (0, 3, 0, 9) * 3],
    no_tensor=[])
KINDS = _cases(
    several_dtypes=[(10, HALF), (10, SINGLE)] * 6 + [(10, BRAIN), (10, WHOLE)] * 3
    + [(5, DOUBLE), (3, SINGLE), (100, HALF)] * 7,
    two_devices=[(10, SINGLE), (10, SINGLE, "meta")] * 3)


def _see(fn, case):
    tensors = case.tensors()
    argument = [*tensors]
    yield {"the plan": Told(_lists(fn(argument, case.threshold)), _in_words),
           "whether `tensors` stays as it is": Must(
               [*map(id, argument)] == [*map(id, tensors)], True)}


def _lists(plan):
    """Return the plan's lists, whose order is free, sorted by their first positions."""
    if not isinstance(plan, list) or not all(isinstance(group, list) for group in plan):
        kinds = {type(group).__name__ for group in plan} if isinstance(plan, list) else ()
        return f"a {type(plan).__name__}{' of ' * bool(kinds)}{', '.join(sorted(kinds))}"
    if types := {type(i).__name__ for group in plan for i in group if type(i) is not int}:
        return f"lists of {', '.join(sorted(types))}"
    return sorted(plan)


def _in_words(got, due):
    """Describe the difference between two plans."""
    if isinstance(got, str):
        return f"{got}, not a list of lists of positions"
    n, times = sum(map(len, due)), sum(got, [])
    if lacks := [i for i in range(n) if i not in times]:
        return f"without tensor {lacks[0]}"
    if twice := [i for i in range(n) if times.count(i) > 1]:
        return f"one with tensor {twice[0]} more than once"
    one, right = next(pair for pair in itertools.zip_longest(got, due) if pair[0] != pair[1])
    return f"one of {len(got)} lists, not of {len(due)}; one is {one}, not {right}"


def _see_refusal(fn, threshold):
    yield {"what a negative threshold raises": must_refuse(fn, [torch.ones(2)], threshold)}


# --- right for another reason ---------------------------------------------------------------------

def kind_by_kind(tensors, threshold):
    """Fuse each kind separately: as many tensors as fit, then the remaining ones."""
    lists = []
    for kind in {(each.dtype, each.device) for each in tensors}:
        rest = [i for i, each in enumerate(tensors) if (each.dtype, each.device) == kind]
        while rest:
            total = list(itertools.accumulate(tensors[i].nbytes for i in rest))
            n = max(1, sum(nbytes <= threshold for nbytes in total))
            lists.append(rest[:n])
            rest = rest[n:]
    return lists


# --- mistakes -------------------------------------------------------------------------------------

def first_list_that_fits(tensors, threshold):
    lists = []  # [kind, bytes, positions]
    for i, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        fits = [each for each in lists if each[0] == kind and each[1] + tensor.nbytes <= threshold]
        if not fits:
            fits = [[kind, 0, []]]
            lists += fits
        fits[0][1] += tensor.nbytes
        fits[0][2].append(i)
    return [positions for *_, positions in lists]


KIND = "tensor.dtype, tensor.device"
FULL, ADD = "last[kind][1] + tensor.nbytes > threshold", "last[kind][1] += tensor.nbytes"
BEGIN, PUT = "last[kind] = [[], 0]", "last[kind][0].append(i)"
IN_TURN, RETURN = "in enumerate(tensors)", "return groups"
START, RAISES = "groups, last = [], {}", "if threshold < 0:"


def _counts(size):
    return FULL, FULL.replace("tensor.nbytes", size), ADD, ADD.replace("tensor.nbytes", size)


FUSE = Proof(
    fuse_tensors,
    Stage("one dtype: in order, each list as full as the threshold allows; 0 turns fusion off",
          _see, ONE_DTYPE, oracle=kind_by_kind),
    Stage("several dtypes, two devices: the newest list of each kind stays open", _see, KINDS,
          oracle=kind_by_kind),
    Stage("a negative threshold is a ValueError; 0 is not", _see_refusal, (-1,),
          note="Keep the check of `threshold` that raises a ValueError."),
    mistakes=(
        Slip("The threshold is in bytes: use tensor.nbytes, not numel().",
             _counts("tensor.numel()")),
        Slip("Not every number has 4 bytes: the size depends on the dtype, so use tensor.nbytes.",
             _counts("4 * tensor.numel()")),
        Slip("Use tensor.nbytes, whatever the shape: len() is only the first dimension.",
             _counts("len(tensor) * tensor.element_size()")),
        Slip("Count tensor.nbytes, not the bytes of the whole storage that the tensor is part of.",
             _counts("tensor.untyped_storage().nbytes()")),
        Slip("A buffer is one tensor, so it has one dtype and one device: kind = tensor.dtype, "
             "tensor.device.", (KIND, "None"), (KIND, "tensor.device")),
        Slip("float16 and bfloat16, or float32 and int32, have the same size but are different "
             "dtypes.", (KIND, "tensor.element_size(), tensor.device")),
        Slip("A buffer is on one device: kind = tensor.dtype, tensor.device.",
             (KIND, "tensor.dtype")),
        Slip("A tensor on another device in between does not close a list: keep the newest list of "
             "*each* (dtype, device) open.",
             (KIND, f"{KIND}\n        last = {{k: held for k, held in last.items() "
              "if k[1] == tensor.device}")),
        Slip("A tensor of another dtype in between does not close a list: keep the newest list of "
             "*each* (dtype, device) open.",
             (KIND, f"{KIND}\n        last = {{k: held for k, held in last.items() "
              "if k[0] == tensor.dtype}")),
        Slip("A tensor of another kind in between does not close a list: keep the newest list of "
             "*each* (dtype, device) open.", (BEGIN, "last = {kind: [[], 0]}"),
             (KIND, f"{KIND}\n        last = {{k: held for k, held in last.items() "
              "if k == kind}")),
        Slip("Count the bytes of each kind separately.",
             (FULL, FULL.replace("last[kind][1]", "sum(held for _, held in last.values())"))),
        Slip("Check before you add: a tensor that does not fit begins a new list.",
             (FULL, "last[kind][1] >= threshold")),
        Slip("A list of exactly `threshold` bytes is still allowed: a tensor that fills it to the "
             "last byte joins it.",
             ("> threshold", ">= threshold")),
        Slip("A list with 0 bytes is still a list: check whether there is one, not how many bytes "
             "it holds.",
             ("kind not in last", "not last.get(kind, [0, 0])[1]")),
        Slip("A new list begins with 0 bytes.",
             (BEGIN, "last[kind] = [[], last.get(kind, [0, 0])[1]]")),
        Slip("Every list must be in the result, including the last one.",
             (RETURN, "return groups[:-1]")),
        Slip("There is an empty list: begin a list only when you have a tensor to put into it.",
             (START, "groups, last = [[]], {}")),
        Slip("Don't leave out a tensor of more than `threshold` bytes: it gets a list of its own.",
             (PUT, f"if tensor.nbytes > threshold:\n            groups.pop()\n            "
              f"del last[kind]\n            continue\n        {PUT}")),
        Slip("A tensor larger than the threshold also begins a list, which is then the newest of "
             "its kind.",
             (KIND, f"{KIND}\n        if tensor.nbytes > threshold:\n"
              "            groups.append([i])\n            continue")),
        Slip("A position is the integer i from enumerate(tensors).",
             (PUT, PUT.replace("(i)", "(tensor)")), (PUT, PUT.replace("(i)", "(str(i))"))),
        Slip("Positions begin at 0.", (IN_TURN, "in enumerate(tensors, 1)")),
        Slip("Return a list of lists: [[0, 1], [2]] if tensors 0 and 1 share a buffer.",
             (RETURN, "yield from groups"), (RETURN, "return [*map(tuple, groups)]"),
             (RETURN, "return {kind: groups for kind, groups in last.items()}"),
             (RETURN, "return tuple(groups)")),
        Slip("Take the tensors in the given order, without sorting them.",
             (IN_TURN, "in sorted(enumerate(tensors), key=lambda one: one[1].nbytes)"),
             (IN_TURN, "in sorted(enumerate(tensors), key=lambda one: one[1].nbytes)",
              RETURN, "return [sorted(group) for group in groups]"),
             (IN_TURN, "in sorted(enumerate(tensors), key=lambda one: -one[1].nbytes)",
              RETURN, "return [sorted(group) for group in groups]")),
        Slip("`tensors` belongs to the caller: don't sort it in place.",
             (START, f"tensors.sort(key=lambda tensor: tensor.nbytes)\n    {START}")),
        Slip("Don't go back to an older list: a tensor joins the newest list of its kind or begins "
             "a new one.", first_list_that_fits),
        Slip("Lists are left over from an earlier call: each call must begin without lists.",
             ("threshold):", "threshold, last={}):", START, "groups = []")),
        Slip("A threshold of 0 is not an error: it turns fusion off.",
             (RAISES, "if threshold <= 0:"), (RAISES, "if not threshold > 0:")),
        Slip("Raise a ValueError if the threshold is negative: otherwise the call continues as if "
             "fusion were off.", (RAISES, "if threshold is None:"), ("raise ValueError(", "str(")),
    ), hints=(
        "For each (dtype, device) keep the newest list, and how many bytes it holds.",
        "A tensor begins a new list if its kind has none yet, or if the newest list's bytes plus "
        "its own exceed the threshold.",
        "if kind not in last or last[kind][1] + tensor.nbytes > threshold: last[kind] = [[], 0]; "
        "groups.append(last[kind][0]). Then, for every tensor: last[kind][0].append(i); "
        "last[kind][1] += tensor.nbytes.",
    ))
