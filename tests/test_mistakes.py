"""Each known mistake is refused, and its own sentence is said: so the tables are current, too.

Of a Proof the sentence is proved by its table. Where an exercise has a check of its own, the check
says it.
"""

import itertools
import random

import pytest
from kernels import on_kernels

from ranklab.checks.failures import is_slip
from ranklab.checks.prover import Proof, tables
from ranklab.checks.prover.slips import edited
from ranklab.course import labs
from ranklab.course.check import FAILED, PASSED, judge

EXERCISES = [item for stem in labs.written() for item in labs.checks_of(stem).EXERCISES]
PROOFS = [item for item in EXERCISES if isinstance(item, Proof)]
PAIRS = 30  # of each exercise, by a fixed seed

pytestmark = pytest.mark.timeout(120)


def swept(is_left):
    return [pytest.mark.sweep] if is_left else []


def mistakes():
    """Every program of every mistake; of each exercise one is in every run, of each another."""
    for i, item in enumerate(EXERCISES):
        programs = [(slip, n) for slip in item.mistakes for n in range(len(slip.programs))]
        for j, (slip, n) in enumerate(programs):
            marks = swept(j != i % len(programs)) + [pytest.mark.slow] * (
                not isinstance(item, Proof))
            yield pytest.param(item, slip, n, id=f"{item.name}-{item.mistakes.index(slip)}-{n}",
                               marks=marks)


@pytest.mark.parametrize("exercise, slip, number", [*mistakes()])
def test_a_mistake_is_refused_and_its_sentence_said(exercise, slip, number):
    verdict = judge(exercise, slip.functions(exercise.answer)[number])
    assert verdict.state == FAILED, verdict
    assert is_said(slip.says, exercise, verdict.mistake), verdict
    assert "  FAIL  " in str(verdict) and f'hint("{exercise.name}")' in str(verdict)


def is_said(sentence, exercise, mistake):
    """True also where the error says all itself, and a Proof adds no sentence."""
    if isinstance(exercise, Proof):
        return sentence in mistake.hint or is_slip(mistake.cause)
    return sentence in " ".join(f"{mistake.what} {mistake.hint}".split())


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda item: item.name)
def test_no_sentence_stands_twice(exercise):
    sentences = [slip.says for slip in exercise.mistakes]
    assert len(sentences) == len({*sentences})
    assert len(sentences) >= 3 and len(exercise.hints) == 3 and all(exercise.hints)
    if isinstance(exercise, Proof):
        shown = [says for of_launch in tables.load(exercise).values() for says in of_launch]
        assert {*shown} == {*sentences}


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("exercise", PROOFS, ids=lambda item: item.name)
def test_a_table_has_the_same_bytes_on_another_cpu(exercise):
    done = on_kernels("the oldest", exercise.name, 580)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def pairs_of(exercise):
    """Two mistakes at once, where their edits do not meet."""
    programs = [(slip.says, program, slip.names) for slip in exercise.mistakes
                for program in slip.programs if not callable(program)]
    both = [pair for pair in itertools.combinations(programs, 2) if pair[0][0] != pair[1][0]]
    random.Random(exercise.name).shuffle(both)
    for (one, first, names), (other, second, more) in both:
        try:
            yield {one, other}, edited(exercise.answer, first + second, **names | more)
        except (ValueError, SyntaxError):
            continue


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("exercise", PROOFS, ids=lambda item: item.name)
def test_two_mistakes_get_no_sentence_that_neither_earns(exercise):
    sentences = {slip.says for slip in exercise.mistakes}
    for earned, both in itertools.islice(pairs_of(exercise), PAIRS):
        verdict = judge(exercise, both)
        if verdict.state == PASSED:
            continue  # one undoes the other
        said = {sentence for sentence in sentences if sentence in verdict.mistake.hint}
        assert said <= earned or is_part_of(said - earned, earned), (earned, str(verdict))


def is_part_of(others, earned):
    """True where a sentence is only seen because it is the beginning of one that is earned."""
    return all(any(other in sentence for sentence in earned) for other in others)
