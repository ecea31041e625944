"""One question, asked: draw its parameters, compute its answer, judge a reply."""
import contextlib
import math
import random
from dataclasses import dataclass

from ranklab.interview.bank import evaluate, modules
from ranklab.interview.text import fill
from ranklab.interview.units import dimension, show

SHARE = 0.7      # an open question counts as known from this share of its rubric on


@dataclass(frozen=True)
class Asked:
    """A question with its numbers filled in."""

    id: str
    kind: str
    text: str
    answer: object               # a float in SI units, or a text
    unit: str
    tolerance: float
    options: tuple               # of a choice, in the order shown
    wrong: tuple                 # of (answer, what it confuses)
    rubric: tuple
    why: str
    values: dict                 # the drawn parameters

    def shown_answer(self):
        """Return the right answer as a reader wants to see it."""
        return show(self.answer, self.unit) if self.kind == "number" else self.answer


def draw(question, seed=0):
    """Draw the parameters of `question` from `seed` (the same seed draws the same numbers).

    Returns: an Asked.
    Raises: the library's error when an answer cannot be computed.
    """
    dice, names = _dice(question, seed), modules(question.uses)
    values, answer = _values(question, names, dice), question.answer
    if question.kind == "number":
        answer = float(evaluate(answer, {**names, **values}))
        wrong = tuple((float(evaluate(text, {**names, **values, "answer": answer})), confuses)
                      for text, confuses in question.wrong)
        answer_text = show(answer, question.unit)
    else:
        answer = answer_text = fill(answer, values)
        wrong = tuple((fill(text, values), confuses) for text, confuses in question.wrong)
    options = [answer, *(text for text, _ in wrong)] if question.kind == "choice" else []
    dice.shuffle(options)
    texts = {**values, "answer": answer_text}
    wrong = tuple((value, fill(confuses, texts)) for value, confuses in wrong)
    return Asked(question.id, question.kind, fill(question.question, values), answer, question.unit,
                 question.tolerance, tuple(options), wrong, question.rubric,
                 fill(question.why, texts), values)


def text_of(question, seed=0):
    """Return the question as `draw` asks it, without its answer, which would need torch.

    None if a number in its text is computed by the library, and so needs torch as well.
    """
    try:
        return fill(question.question, _values(question, {}, _dice(question, seed), (NameError,)))
    except (NameError, KeyError):
        return None


def _dice(question, seed):
    return random.Random(f"{question.id} {seed}")


def _values(question, names, dice, left_out=()):
    """Return {parameter: value}; a value may follow from earlier ones.

    left_out  errors of an expression that leave its parameter out. A drawn parameter must not fail:
              the dice would give different numbers afterwards
    """
    values = {}
    for name, rule in question.parameters.items():
        with contextlib.suppress(*(() if isinstance(rule, dict) else left_out)):
            values[name] = _one(rule, {**names, **values}, dice)
    return values


def _one(rule, names, dice):
    if isinstance(rule, list):
        return dice.choice(rule)
    if isinstance(rule, dict):
        low, high, step = (evaluate(rule.get(key, 1), names) for key in ("from", "to", "step"))
        return dice.randrange(low, high + 1, step)
    return evaluate(rule, names)


def close(value, reference, tolerance):
    """Return True when `value` is within the relative `tolerance` of `reference`."""
    return math.isclose(value, reference, rel_tol=max(tolerance, 1e-9), abs_tol=1e-12)


def judge(item, reply):
    """Judge a reply: a number in SI units, or the text of a choice.

    Returns: (is it right, what the reply confuses or "").
    """
    if item.kind == "choice":
        return reply == item.answer, dict(item.wrong).get(reply, "")
    if close(reply, item.answer, item.tolerance):
        return True, ""
    for value, confuses in item.wrong:
        if close(reply, value, item.tolerance):
            return False, confuses
    return False, _usual_slip(reply, item)


def _usual_slip(reply, item):
    if not reply or not item.answer:
        return ""
    ratio = reply / item.answer
    near = lambda factor: math.isclose(ratio, factor, rel_tol=max(item.tolerance, 0.005))
    if dimension(item.unit) in ("a size", "a bandwidth") and (near(8) or near(1 / 8)):
        return "that is off by exactly 8: bits for bytes."
    if near(2) or near(1 / 2):
        return "that is off by exactly 2."
    if ratio > 0 and abs(math.log10(ratio)) > 0.5 and near(10 ** round(math.log10(ratio))):
        return "the digits are right, the power of ten is not: check the units."
    return ""
