"""How a check runs the learner's code on ranks, and how two values are compared and told apart."""

import contextlib
import contextvars
import importlib
import inspect
import math
import re
import sys
import traceback

import torch
import torch.distributed as dist

from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import cause_of_hang, why_dead, why_hang
from ranklab.checks.library_guard import LibrarysAnswer, calls_watched
from ranklab.engine import HangError, RankError, launch, ship
from ranklab.engine.report import PACKAGE

LIMIT = 10  # seconds for one launch of a check, on an idle machine
STALL = 1  # second, after which ranks that all wait for each other are told so
# How many roundings in a row may lie on the way to a right answer, each of half an eps: sums of a
# few hundred terms, in any order, on any CPU. Kernels add up 16-bit numbers in float32, so few of
# their own remain. In float64 there is room: who went through float32 is 60 times further off.
ROUNDINGS = {torch.float64: 2**23, torch.float32: 2**8, torch.float16: 6, torch.bfloat16: 6}

INPUT = 60  # characters of an argument, where an error names it

_under_test = contextvars.ContextVar("the Exercise that is being checked", default=None)
_watch = contextvars.ContextVar("who is told where ranks are while they run", default=None)


@contextlib.contextmanager
def under_test(exercise, watch=None):
    """Watch the learner's code, here and on ranks.

    A call of the library's answer is told to the learner, and an error names the arguments of their
    function.
    watch: called every 10 s that ranks run, with a text that says where they are
    """
    tokens = (_under_test, _under_test.set(exercise)), (_watch, _watch.set(watch))
    try:
        with calls_watched(exercise.answer), inputs_named(exercise.name):
            yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


@contextlib.contextmanager
def unwatched():
    """Keep ranks, inside the block, from asking who calls the library's answer.

    Known mistakes run there.
    """
    token = _under_test.set(None)
    try:
        yield
    finally:
        _under_test.reset(token)


@contextlib.contextmanager
def inputs_named(name):
    """Add a note to an error that passes: with which arguments the learner's `name` was called."""
    try:
        yield
    except Mistake:
        raise
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        called = next((frame for frame in frames if _is_of(frame.f_code, name)), None)
        if called:
            arguments = inspect.getargvalues(called)
            names = [*arguments.args, *filter(None, [arguments.varargs, arguments.keywords])]
            error.add_note(f"in {called.f_code.co_qualname}(" + ", ".join(
                f"{each}={_short(arguments.locals[each])}" for each in names
                if each in arguments.locals and each != "self") + ")")
        raise


@contextlib.contextmanager
def called_with(words):
    """Add these words to what is raised inside: the arguments, where they are too long to print."""
    try:
        yield
    except Exception as error:
        error.add_note(f"called with {words}")
        raise


def _is_of(code, name):
    """Return whether it is the code of the learner's function `name`, or of a method of theirs."""
    return (code.co_qualname == name or code.co_qualname.startswith(f"{name}.")
            ) and not code.co_filename.startswith(PACKAGE)


def _short(value):
    """`value` as an error names it; of a tensor, shape and type."""
    if isinstance(value, torch.Tensor) and value.numel() > 8:
        return f"<{tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}>"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a repr of the learner's, perhaps
        text = f"<{type(value).__name__}>"
    text = re.sub(r"<(?:function )?([\w.]+)[^<>]* at 0x\w+>", r"<\1>", text)
    return text if len(text) <= INPUT else f"{text[:INPUT - 4]} ..."


def on_ranks(trial, *args, ranks, nodes=1, timeout=LIMIT, preload=()):
    """Run `trial(*args)` on all ranks and return the values.

    Raises: Mistake for what the learner's code breaks
    """
    exercise = _under_test.get()
    answer = exercise and (exercise.answer.__module__, exercise.name)
    where = "on 1 rank" if ranks == 1 else f"on {ranks} ranks"
    try:
        call = ship.dumps_call(trial, args)
    except TypeError as error:
        raise Mistake(str(error), "It uses a notebook variable that can't be sent to the ranks, "
                                  "such as an open file, a lock or a generator.") from None
    try:
        return launch(_run, call, answer, ranks=ranks, nodes=nodes, timeout=timeout, stall=STALL,
                      preload=preload, watch=_watch.get())
    except HangError as hang:
        states = hang.failures
        raise Mistake(f"{where} it does not end: {hang}", why_hang(states),
                      cause_of_hang(states)) from None
    except RankError as error:
        cause = error.failures.get(error.rank, "")
        if exercise and cause.startswith(LibrarysAnswer.__name__):
            raise LibrarysAnswer(exercise.name) from None
        raise Mistake(f"{where}, {error}", why_dead(cause), cause, error.rank) from None
    except RuntimeError as error:
        if sys.platform == "win32":  # launch says what to do; what was written is not to blame
            raise Mistake(str(error)) from None
        raise


def _run(call, answer):
    if not answer:
        trial, args = ship.loads(call)
        return trial(*args)
    module, name = answer
    with calls_watched(getattr(importlib.import_module(module), name)), inputs_named(name):
        trial, args = ship.loads(call)
        return trial(*args)


def gathered(value, group=None):
    """Return every rank's `value`, tensors on the CPU.

    dist.all_gather_object pickles each tensor with its storage, which takes ten times as long.
    """
    packed = [None] * dist.get_world_size(group)
    dist.all_gather_object(packed, ship.dumps(value), group=group)
    return [*map(ship.loads, packed)]


NO_ERROR = "no ValueError"


def refuses(function, *args, **keywords):
    """Return whether the call raises a ValueError."""
    return refusal(function, *args, **keywords) != NO_ERROR


def refusal(function, *args, **keywords):
    """Return the text of the ValueError that the call raises, or NO_ERROR."""
    try:
        function(*args, **keywords)
    except ValueError as error:
        return str(error)
    return NO_ERROR


def rounding(*dtypes, roundings=0):
    """Return by which share of the largest number two right answers may differ.

    dtypes     all types on the way; the narrowest decides
    roundings  more of them, in float32, in which kernels compute: where exp() is taken of scores up
               to s, an error of half an eps in a score is s of them in the result
    """
    narrowest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    return (ROUNDINGS[narrowest] * torch.finfo(narrowest).eps
            + roundings * torch.finfo(torch.float32).eps) / 2


def is_near(got, right, through=None, roundings=0):
    """Return whether two tensors of one shape and type, or two numbers, differ by rounding only.

    Infinities must be equal; NaN equals NaN. Numbers are compared as formulas in float64 give them.

    through    a type on the way that is narrower than the result: a float64 parameter whose
               gradient came from float32 layers
    roundings  see rounding()
    """
    if not isinstance(right, torch.Tensor):
        return isinstance(got, (int, float)) and math.isclose(
            got, right, rel_tol=rounding(through, roundings=roundings) if through else 1e-6)
    if not isinstance(got, torch.Tensor) or (got.shape, got.dtype) != (right.shape, right.dtype):
        return False
    if not right.is_floating_point() or not right.numel():
        return torch.equal(got, right)
    tolerance = rounding(right.dtype, *filter(None, [through]), roundings=roundings)
    got, right = got.detach().double(), right.detach().double()
    finite = right.isfinite()
    if not finite.all():
        if not got[~finite].allclose(right[~finite], 0, 0, equal_nan=True):
            return False
        got, right = got[finite], right[finite]
    return not right.numel() or bool((got - right).abs().max() <= tolerance * right.abs().max())


def instead(got, right):
    """Return as text what a value is instead of what is right."""
    if not isinstance(got, type(right)) and not isinstance(got, (int, float)):
        return "None" if got is None else f"a {type(got).__name__}"
    if not isinstance(right, torch.Tensor):
        return "{}, not {}".format(*told_apart(got, right))
    if not isinstance(got, torch.Tensor):
        return f"the number {got:.6g}, not a tensor"
    if got.shape != right.shape:
        return f"of shape {tuple(got.shape)}, not {tuple(right.shape)}"
    if got.dtype != right.dtype:
        return f"{got.dtype}, not {right.dtype}"
    got, right = got.detach().flatten(), right.detach().flatten()
    apart = (got.double() - right.double()).abs().nan_to_num(torch.inf)
    apart[(got == right) | (got.isnan() & right.isnan())] = 0  # inf - inf is NaN
    at = int(apart.argmax())
    return "{} at element {}, not {}".format(*told_apart(got[at].item(), right[at].item(), at))


def told_apart(got, right, *between):
    """Return two numbers as text, with six digits or as many as show that they differ."""
    for digits in range(6, 18):
        texts = f"{got:.{digits}g}", f"{right:.{digits}g}"
        if texts[0] != texts[1] or got == right:
            break
    return texts[0], *between, texts[1]
