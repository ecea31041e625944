"""check: is the learner's function right, and is the number right? It never blocks the lab.

    ring_all_reduce = check(ring_all_reduce)     # the learner's when it passes, else the library's
    check(megabytes_sent=150)
"""

import contextlib
import dis
import inspect
import math
import signal
import threading
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real

from ranklab.checks.exercise import Mistake, refuse_signature, shown, tell_signature
from ranklab.checks.failures import is_slip
from ranklab.checks.formula import POINTS, Formula
from ranklab.checks.library_guard import LibrarysAnswer, is_made_of
from ranklab.checks.trial import under_test
from ranklab.course import labs, progress
from ranklab.course.alive import signs_of_life
from ranklab.course.cells import text_of
from ranklab.course.show import show
from ranklab.course.spine import next_after
from ranklab.engine.report import Failure

LIMIT = 120  # seconds for a whole check, on a busy machine
PASSED, FAILED, NOT_WRITTEN, LIBRARYS = "passed", "failed", "not written yet", "the library's own"


@dataclass
class Verdict:
    """The result of a check: the properties that hold, and the first that does not."""

    name: str
    state: str = PASSED
    holds: list = field(default_factory=list)
    mistake: Mistake | None = None

    def __str__(self):
        lines = [self.name]
        if self.state == NOT_WRITTEN:
            lines.append(f"  --    {self.state}")
        if self.state == LIBRARYS:
            lines.append(f"  --    {LIBRARYS}: the last check failed, or your cell has not run. "
                         "Run it, then\n        this one.")
        lines += [f"  ok    {sentence}" for sentence in self.holds]
        if self.mistake:
            lines.append(f"  FAIL  {_indent(self.mistake.what)}")
            if self.mistake.hint:
                lines.append(f"        {_indent(self.mistake.hint)}")
        if self.state in (NOT_WRITTEN, FAILED):
            lines.append(f"  ->    the rest of this lab uses the library's {self.name}. "
                         f'hint("{self.name}") has more.')
        return "\n".join(lines)


def _indent(text):
    return "\n".join(text.splitlines()).replace("\n", "\n        ")


def check(learner_fn=None, /, **predictions):
    """Print and record the verdict; return what the rest of the lab uses.

    Returns: the learner's function or class when it passes, and the library's when it does not yet
    Keywords check numbers: check(megabytes_sent=150), where `...` is "not predicted yet";
    or formulas: check(largest_data_parallel=lambda tokens, flops, bandwidth: ...).
    """
    for name, value in predictions.items():
        _check_prediction(name, value)
    if learner_fn is None:
        if not predictions:
            print("check: put your function, or a prediction, between the brackets.")
        return None
    name = getattr(learner_fn, "__name__", repr(learner_fn))
    exercise = labs.find_exercise(name)
    if exercise is None:
        _no_such("exercise", name)
        return learner_fn
    verdict = judge(exercise, learner_fn)
    mistake = verdict.mistake or Mistake("")
    _show_and_record(name, verdict.state, str(verdict), cell=text_of(learner_fn),
                     reason=mistake.what, advice=mistake.hint)
    return learner_fn if verdict.state == PASSED else exercise.answer


def _no_such(kind, name):
    near = labs.near(name, n=1)
    print(f"check: no {kind} is called {name}. Keep the name that the lab gave it"
          + (f": {near[0]}?" if near else "."))


def _show_and_record(name, state, text, cell="", reason="", advice=""):
    if state == FAILED:
        progress.record(name, state, reason=reason.partition("\n")[0], advice=advice)
    if state == PASSED:
        progress.record(name, state, cell)
        next_line = next_after(name, progress.load())
        text += f"\n  ->    passed; {next_line}" if next_line else "\n  ->    passed"
    show(text)


def judge(exercise, learner_fn) -> Verdict:
    """Return the Verdict on `learner_fn`; nothing is printed or recorded."""
    verdict = Verdict(exercise.name)
    if learner_fn is exercise.answer:
        verdict.state = LIBRARYS
        return verdict
    if is_stub(learner_fn):
        verdict.state = NOT_WRITTEN
        return verdict
    try:
        if is_made_of(learner_fn, exercise.answer):
            raise LibrarysAnswer(exercise.name)
        refuse_signature(exercise.answer, learner_fn)
        with signs_of_life(exercise.name) as tell, under_test(exercise, tell), _time_limit():
            verdict.holds.extend(exercise.check(learner_fn))
    except Mistake as mistake:
        verdict.mistake = mistake
    except (Exception, SystemExit) as error:
        verdict.mistake = _raised(error)
    if verdict.mistake:
        if is_slip(verdict.mistake.cause):
            verdict.mistake.hint = ""
        tell_signature(exercise.answer, learner_fn, verdict.mistake)
        verdict.state = FAILED
    return verdict


class _OutOfTime(BaseException):
    """Raised at the time limit. Not an Exception, so that no `except Exception` catches it."""


@contextlib.contextmanager
def _time_limit():
    """Turn an endless loop in the block into a Mistake. (A launch has its own limit.)"""
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and hasattr(signal, "setitimer")):
        yield  # only the main thread gets signals, and Windows has no timer
        return

    def end(*_):
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, end)
    delay, _ = signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    except _OutOfTime:
        raise Mistake(f"it was not done after {LIMIT} s",
                      "Is there a loop that never ends?") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, delay)
        signal.signal(signal.SIGALRM, before)


def is_stub(learner_fn):
    """Return whether the stub's `raise NotImplementedError("exercise ...")` is still there.

    Nothing is run. A NotImplementedError of the learner, with a different text, is not a stub.
    """
    parts = vars(learner_fn).values() if isinstance(learner_fn, type) else [learner_fn]
    parts = [getattr(part, "fget", getattr(part, "__func__", part)) for part in parts]
    codes = [getattr(inspect.unwrap(part), "__code__", None) for part in parts if callable(part)]
    return any(_raises_as_stub(code) for code in codes if code)


def _raises_as_stub(code):
    # Instructions, not co_names: a `raise` left below the learner's `return` is never reached.
    loaded = [step.argval for step in dis.get_instructions(code)]
    return ("NotImplementedError" in loaded
            and any(isinstance(value, str) and value.startswith("exercise ") for value in loaded)
            or any(_raises_as_stub(inner) for inner in code.co_consts if inspect.iscode(inner)))


def _raised(error):
    failure = Failure.from_error(error)
    if any(frame.is_of_learner() for frame in failure.frames):
        return Mistake(f"it raised {failure.headline()}\n{failure}",
                       cause=failure.headline())
    return Mistake(f"what it returned can't be used: {failure.headline()}",
                   "Does it return what the first line of its docstring says?")


def _check_prediction(name, value):
    prediction = labs.find_prediction(name)
    if prediction is None:
        _no_such("prediction", name)
        return
    state, text = judge_prediction(prediction, value)
    advice = ""
    if state == FAILED and not isinstance(prediction, Formula):
        advice = _confusion(prediction, _as_float(value))
    _show_and_record(name, state, f"{name}\n  {text}", reason=text.removeprefix("FAIL  "),
                     advice=advice)


def judge_formula(formula, value):
    """Judge a formula that a learner derived; return (state, what to print)."""
    if value is None or value is ...:
        return NOT_WRITTEN, f"--    not derived yet: in place of ... put {formula.stub}"
    try:
        with _time_limit():
            fault = formula.fault_of(value)
    except Mistake as mistake:
        fault = mistake.what
    if fault:
        return FAILED, f"FAIL  {fault}"
    return PASSED, f"ok    right at {POINTS} points. {formula.why}".rstrip()


def judge_prediction(prediction, value):
    """Judge a predicted number, or a formula; return (state, what to print)."""
    if isinstance(prediction, Formula):
        return judge_formula(prediction, value)
    if value is None or value is ...:
        return NOT_WRITTEN, "--    not predicted yet: put your number in place of ..."
    guess = _as_float(value)
    if not math.isfinite(guess):
        text = " ".join(repr(value).split())[:40]
        return FAILED, f"FAIL  a number is wanted, without quotes; got {text}"
    right, tolerance = prediction.answer(), prediction.tolerance
    unit = f" {prediction.unit}" if prediction.unit else ""
    number = shown(guess, digits=10 if tolerance == 0 else 6)
    if confusion := _confusion(prediction, guess):
        return FAILED, f"FAIL  {number}{unit}: {confusion}"
    if math.isclose(guess, right, rel_tol=tolerance):
        return PASSED, f"ok    {number}{unit}. {prediction.why}".rstrip()
    if tolerance and _is_rounded(guess, right):
        return PASSED, f"ok    {number}{unit}, {shown(right)} rounded. {prediction.why}".rstrip()
    if tolerance == 0 and right == round(right) and guess != round(guess):
        return FAILED, f"FAIL  {number}{unit}: a whole number is wanted"
    if prediction.unit == "%" and tolerance and math.isclose(100 * guess, right, rel_tol=tolerance):
        return FAILED, f"FAIL  {number} is a share. In {unit.strip()} it is {shown(100 * guess)}"
    way = "too small" if guess < right else "too large"
    return FAILED, f'FAIL  {number}{unit} is {way}. hint("{prediction.name}") has more.'


def _confusion(prediction, number):
    """Return what was confused, if the number is a common mistake; else ""."""
    right, tolerance = prediction.answer(), prediction.tolerance
    for slip, confusion in (prediction.mistakes or {}).items():
        # A slip that lies within the tolerance of the right number must be matched more closely.
        distance = abs(slip - right) / max(abs(slip), abs(right))
        if math.isclose(number, slip, rel_tol=min(tolerance, distance / 4)):
            return confusion
    return ""


def _is_rounded(guess, right, digits=2):
    """Return whether `guess` is `right` in `digits` significant digits: 25 for 24.74."""
    if not right:
        return False
    unit = 10.0 ** (math.floor(math.log10(abs(right))) - digits + 1)
    return (math.isclose(guess, round(guess / unit) * unit, rel_tol=1e-9)
            and abs(guess - right) <= unit / 2 * (1 + 1e-9))


def _as_float(value):
    """Convert `value`, or a scalar of torch or numpy, to float; NaN where it is not a number."""
    try:
        if hasattr(value, "item") and getattr(value, "shape", None) == ():
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (Real, Decimal)):
            return math.nan
        return float(value)
    except (OverflowError, ValueError, RuntimeError):  # 10**400; Decimal("sNaN"); a meta tensor
        return math.nan
