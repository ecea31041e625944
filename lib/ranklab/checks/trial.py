"""How a check runs the learner's code on ranks, and how it says what came out of it.

    seen = on_ranks(trial, fn, ranks=3)              # a crash or a hang is a Mistake
    explain(f"{rank_name(1, 3)}: the gradient", got, right, {"the sum": (3 * right, "Divide.")})
"""

import contextlib
import contextvars
import importlib
import math
import sys

import torch
import torch.distributed as dist

from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import cause_of_hang, why_dead, why_hang
from ranklab.checks.library_guard import LibrarysAnswer, calls_watched
from ranklab.engine import HangError, RankError, launch, ship

LIMIT = 10  # seconds for one launch of a check, on an idle machine
STALL = 1  # second, after which ranks that all wait for each other are told so
GROUPS = (0,), (1, 2, 3)  # of four ranks: one alone, and three whose numbers begin at 1
# Of the largest number: sums of a few hundred terms, in any order, stay within it.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

_under_test = contextvars.ContextVar("the Exercise that is being checked", default=None)


@contextlib.contextmanager
def under_test(exercise):
    """Inside, here and on ranks, the learner's code that calls the library's answer is told so."""
    token = _under_test.set(exercise)
    try:
        with calls_watched(exercise.answer):
            yield
    finally:
        _under_test.reset(token)


def on_ranks(trial, *args, ranks, nodes=1, timeout=LIMIT, preload=()):
    """The values of `trial(*args)` on all ranks; what the learner's code breaks is a Mistake."""
    exercise = _under_test.get()
    answer = exercise and (exercise.answer.__module__, exercise.name)
    where = "on 1 rank" if ranks == 1 else f"on {ranks} ranks"
    try:
        call = ship.dumps_call(trial, args)
    except TypeError as error:
        raise Mistake(str(error), "It uses a name of the notebook that holds something that "
                      "can't travel: an open file, a lock, a generator.") from None
    try:
        return launch(_run, call, answer, ranks=ranks, nodes=nodes, timeout=timeout, stall=STALL,
                      preload=preload)
    except HangError as hang:
        doing = hang.failures
        raise Mistake(f"{where} it does not end: {hang}", why_hang(doing),
                      cause_of_hang(doing)) from None
    except RankError as error:
        cause = error.failures.get(error.rank, "")
        if exercise and cause.startswith(LibrarysAnswer.__name__):
            raise LibrarysAnswer(exercise.name) from None
        raise Mistake(f"{where}, {error}", why_dead(cause), cause) from None
    except RuntimeError as error:
        if sys.platform == "win32":  # launch says what to do; what was written is not to blame
            raise Mistake(str(error)) from None
        raise


def _run(call, answer):
    if not answer:
        trial, args = ship.loads(call)
        return trial(*args)
    module, name = answer
    with calls_watched(getattr(importlib.import_module(module), name)):
        trial, args = ship.loads(call)
        return trial(*args)


NO_ERROR = "no ValueError"


def refuses(function, *args):
    """True where it raises a ValueError."""
    return refusal(function, *args) != NO_ERROR


def refusal(function, *args):
    """The text of the ValueError that it raises, or NO_ERROR."""
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    return NO_ERROR


def members_of(rank):
    """The ranks of the group that `rank` is in, on four ranks."""
    return GROUPS[rank > 0]


def group_of_mine():
    """On four ranks: the group of `members_of(my rank)`."""
    made = [dist.new_group(members) for members in GROUPS]
    return made[dist.get_rank() > 0]


def rank_name(rank, ranks):
    """As every check names a rank."""
    return f"rank {rank} of {ranks}"


def is_near(got, right):
    """True for tensors of one shape and type, or for two numbers, that differ by rounding only."""
    if not isinstance(right, torch.Tensor):
        return isinstance(got, (int, float)) and math.isclose(got, right, rel_tol=1e-6)
    if not isinstance(got, torch.Tensor) or (got.shape, got.dtype) != (right.shape, right.dtype):
        return False
    if not right.is_floating_point() or not right.numel():
        return torch.equal(got, right)
    got, tolerance = got.detach().double(), TOLERANCE[right.dtype]
    right = right.detach().double()
    return bool((got - right).abs().max() <= tolerance * right.abs().max())


def explain(where, got, right, slips=None, hint=""):
    """Returns when `got` is `right` but for rounding; else a Mistake says what it is instead.

    slips  {"the sum over ranks": (R * right, "Divide by R."), ...}: what usual mistakes get, and a
           hint about each; the first that fits is named. One that is right is passed over
    hint   for all others
    """
    if is_near(got, right):
        return
    for name, (wrong, advice) in (slips or {}).items():
        if is_near(got, wrong) and not is_near(wrong, right):
            raise Mistake(f"{where} is {name}", advice)
    raise Mistake(f"{where} is {_instead(got, right)}", hint)


def _instead(got, right):
    if not isinstance(got, type(right)) and not isinstance(got, (int, float)):
        return "None" if got is None else f"a {type(got).__name__}"
    if not isinstance(right, torch.Tensor):
        return f"{got:.6g}, not {right:.6g}"
    if got.shape != right.shape:
        return f"of shape {tuple(got.shape)}, not {tuple(right.shape)}"
    if got.dtype != right.dtype:
        return f"{got.dtype}, not {right.dtype}"
    apart = (got.detach().double() - right.detach().double()).abs().nan_to_num(torch.inf)
    at = int(apart.argmax())
    return (f"{got.flatten()[at].item():.6g} at element {at}, not "
            f"{right.flatten()[at].item():.6g}")
