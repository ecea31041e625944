"""A difference in a few numbers: small, the same on every CPU but for rounding, and no two alike
that are not.
"""

import math
import re
import zlib

import torch

from ranklab.checks.prover.compare import (
    Agree, AtMost, InAll, Must, Raised, Told, Traced, plain, value_at,
)
from ranklab.checks.trial import rounding

DIFFERENCES = 6  # of a mistake, that are kept: more are not needed to tell it from others
RANKS = 3        # and of each so many ranks
ITEMS = 8        # of a list, each for itself; of a longer one as of a tensor
TEXT = 200       # characters
LITTLE, NAME, DIGITS = 4, 40, 4  # values in all; characters of a word, and of a number
AN_ERROR = re.compile(r"\w*(Error|Exception|Iteration|Exit)\b")
FINE, COARSE = 1e-4, 2e-2  # two digests are alike, in float32 and wider, and in 16 bits
CHANCE = re.compile(r"""      # of an error's text: what another run or another torch has not
    \[[EWF]\d{3}\ .*?\]         # when and where C++ logged it
    | \[enforce\ fail\ at\ \S+\]\  | \ at\ "/\S+ | /tmp/\S+
    | \.\ \.\ .*                # what gloo adds: addresses, its advice
    | \n\nAt:\n.*               # the stack of a future's callback: it may run in another thread
    | :\d{4,5}\b | 0x[0-9a-f]+ | \(?\b\d+\ vs\.?\ \d+\)?
    """, re.X | re.S)


def of_difference(difference):
    """Return [how many differ, [[step, name, ranks, [digest of each rank]], ...]]; of what broke
    [cause, number of the case].
    """
    if difference.broken:
        cause = re.sub(r"SIG(ABRT|SEGV)", "SIGABRT", difference.broken.cause)
        return [_of_text(cause), difference.broken.case]
    items = [*difference.apart.items()][:DIFFERENCES]
    return [len(difference.apart), [
        [[*step], name, ranks, [_of_one(difference, rank, step, name)
                                for rank in ranks_kept(ranks)]] for (step, name), ranks in items]]


def _of_one(difference, rank, step, name):
    got = value_at(difference.seen[rank], step, name)
    due = difference.right[rank][step].values[name]
    traced = got.value if isinstance(got, Must | Told) else got
    if not isinstance(traced, Traced):
        return of_value(got)
    right = plain(due.be if isinstance(due, Must) else due)
    return [of_value(traced), of_value(traced.trace(traced.value, right))]


def ranks_kept(ranks):
    return ranks if len(ranks) <= RANKS else [*ranks[:RANKS - 1], ranks[-1]]


def tells_little(items):
    """Return whether so little differs in these items of a difference that a mistake that no table
    knows may show the same: a few short numbers, words or names, or an error.

    A word counts once, however many cases show it, and so does a number that is always the same.
    """
    values = [value for *_, of_ranks in items for value in _flat(of_ranks[0])]
    words = {value for value in values if isinstance(value, str | bool | None)}
    numbers = [value for value in values if type(value) in (int, float)]
    if len({*numbers}) == 1:
        numbers = numbers[:1]
    return len(words) + len(numbers) <= LITTLE and all(map(_is_short, values))


def _is_short(value):
    if isinstance(value, str):
        return len(value) < NAME or bool(AN_ERROR.match(value))
    return isinstance(value, bool | int | None) or isinstance(value, float) and (
        len(f"{value:g}") <= DIGITS)


def _flat(value):
    if not isinstance(value, list):
        return [value]
    return [number for each in value for number in _flat(each)]


def of_value(value):
    """Return what is kept of one value: of a tensor its type, its shape and four numbers."""
    value = plain(value[0] if isinstance(value, Agree | Must) else value)
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, AtMost | InAll):
        return value.number
    if isinstance(value, Raised):
        return _of_text(value.headline)
    if isinstance(value, float):
        return _digits(value)
    if isinstance(value, list | tuple):
        return [*map(of_value, value)] if len(value) <= ITEMS else _of_leaves([*_leaves(value)])
    if isinstance(value, dict):
        return of_value([*value.items()])
    return value if isinstance(value, bool | int | None) else str(value)[:TEXT]


def _of_text(text):
    return CHANCE.sub("", text)[:TEXT]


def _leaves(value):
    """Yield numbers that stand for all that is in a list, however deep, and for its form."""
    if isinstance(value, list | tuple | dict):
        yield len(value)
        for each in value.items() if isinstance(value, dict) else value:
            yield from _leaves(each)
    elif isinstance(value, torch.Tensor):
        yield from value.double().flatten().tolist()
    else:
        yield value if isinstance(value, int | float) else zlib.crc32(str(value).encode())


def _of_leaves(leaves):
    if any(isinstance(leaf, float) for leaf in leaves):
        return _of_tensor(torch.tensor(leaves, dtype=torch.float64))
    return {f"{len(leaves)} in all": [zlib.crc32(repr(leaves).encode())]}


def _of_tensor(x):
    """Return {type and shape: [sum of magnitudes, three weighted sums as shares of it]}; of what
    knows no rounding {type and shape: [a hash]}.
    """
    x = torch.view_as_real(x) if x.is_complex() else x
    kind, shape = str(x.dtype).removeprefix("torch."), "x".join(map(str, x.shape))
    if not x.is_floating_point():
        return {f"{kind} {shape}": [zlib.crc32(repr(x.flatten().tolist()).encode())]}
    x = x.double().flatten()
    finite = x.isfinite()
    kind += f" {shape}" + f", {int((~finite).sum())} not finite" * (not finite.all())
    x = torch.where(finite, x, 0)
    magnitude = x.abs().sum().item()
    shares = [(x * weights).sum().item() / (magnitude or 1) for weights in _weights(len(x))]
    return {kind: [_digits(magnitude), *(round(share, 5) + 0.0 for share in shares)]}


def _weights(n):
    """Yield ones, and two sequences without a pattern between -1 and 1."""
    yield torch.ones(n, dtype=torch.float64)
    for factor in (2654435769, 1779033703):  # the golden ratio and the root of 2, times 2^32
        at = (torch.arange(1, n + 1) * factor) % 2**32
        yield at.double() / 2**31 - 1


def _digits(number):
    return float(f"{number:.6g}") if math.isfinite(number) else str(number)


def is_alike(x, y, tolerance=FINE):
    """Return whether two digests are of the same, but for rounding."""
    if isinstance(x, list) and isinstance(y, list):
        return len(x) == len(y) and all(
            is_alike(*pair, tolerance) for pair in zip(x, y))
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(
            _is_of_like_tensors(kind, x[kind], y[kind], tolerance) for kind in x)
    if isinstance(x, float) or isinstance(y, float):
        return isinstance(x, float | int) and isinstance(y, float | int) and math.isclose(
            x, y, rel_tol=tolerance)
    return type(x) is type(y) and x == y


def _is_of_like_tensors(kind, x, y, tolerance):
    """The shares are at most 1: these, and only these, are near 0 by rounding."""
    if isinstance(x[0], int) and isinstance(y[0], int):
        return x == y
    tolerance = COARSE if kind.startswith(("bfloat16 ", "float16 ")) else tolerance
    return is_alike(x[0], y[0], tolerance) and all(
        abs(a - b) <= tolerance for a, b in zip(x[1:], y[1:]))


def tolerance_of(stage):
    """Return within what two digests of a stage are alike."""
    narrowest = rounding(stage.through or torch.float64, roundings=stage.roundings)
    return max(FINE, 2 * narrowest)


def explains(mistake, difference, target, stage):
    """Return how much of a difference is also seen of the mistake; 0 where they are not the same.

    mistake  its digest
    target   that of the difference
    """
    if isinstance(mistake[0], str) or isinstance(target[0], str):
        return int(mistake == target)
    number, items = mistake
    if number > target[0] or any(not {*ranks} <= {*difference.apart.get((tuple(step), name), ())}
                                 for step, name, ranks, _ in items):
        return 0  # it is wrong where target is right
    tolerance = tolerance_of(stage)
    same = [any(is_alike(x, y, tolerance) for y in items) for x in target[1]]
    is_whole = number == target[0] and all(same)
    shared = [item for item, is_same in zip(target[1], same) if is_same]
    if not same[0] or not is_whole and all(tells_little([item]) for item in shared):
        return 0
    return sum(same) + (number == target[0]) / 2  # of equal fits, the whole one
