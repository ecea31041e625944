"""What every check is made of: comparing, and seeing whose answer it is."""

import contextlib
import textwrap
import types
from pathlib import Path

import pytest
import torch

from ranklab.checks import exercise, trial
from ranklab.checks.exercise import Mistake
from ranklab.checks.library_guard import LibrarysAnswer, calls_watched, is_made_of
from ranklab.checks.trial import instead, is_near
from ranklab.course import labs
from ranklab.course.check import judge


def in_file(file, source, **names):
    """What `source` defines, as if it stood in `file`."""
    exec(compile(textwrap.dedent(source), str(file), "exec"), names)
    return types.SimpleNamespace(**names)


def test_library_code_may_be_built_on_the_answer_but_the_learners_may_not():
    package = Path(trial.__file__).parent.parent
    library = in_file(package / "zero.py", """
        def shard(x): return x[:1]
        def train(x, fn=None): return fn(x) if fn else shard(x)""")
    learner = in_file("<a cell>", """
        def calls(x): return library.shard(x)
        def by_the_library(x): return library.train(x)
        def writes(x): return x[:1]""", library=library)
    judge_ = in_file(package / "checks" / "zero.py", "def call(fn, *args): return fn(*args)").call
    with calls_watched(library.shard):
        assert judge_(library.train, "ab") == judge_(learner.writes, "ab") == "a"
        assert judge_(library.train, "ab", learner.writes) == "a"
    for cheat in (learner.calls, learner.by_the_library, library.shard,
                  lambda x: library.train(x, library.shard)):
        with calls_watched(library.shard), pytest.raises(LibrarysAnswer, match="own shard"):
            judge_(cheat, "ab")
    assert learner.calls("ab") == "a", "and all is as before"


@pytest.mark.filterwarnings("error")
def test_a_generator_is_watched_from_the_call_on():
    """Not only from its first value on, which the check asks for."""
    def answer(n):
        yield from range(n)

    with calls_watched(answer), pytest.raises(LibrarysAnswer, match="own answer"):
        answer(2)
    assert [*answer(2)] == [0, 1], "and all is as before"


def test_a_class_is_watched_with_all_its_methods():
    class Answer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.x = 1

        @staticmethod
        def size():
            return 3

    class Mine(Answer):
        pass

    for call in (Answer, Answer.size, Mine):
        with calls_watched(Answer), pytest.raises(LibrarysAnswer, match="own Answer"):
            call()
    assert Answer().x == 1 and Mine.size() == 3


@pytest.mark.parametrize("name", ["mfu", "ring_all_reduce"])  # here, and on ranks
def test_a_function_of_the_librarys_code_is_the_librarys(name):
    answer = labs.find_exercise(name).answer
    copy = types.FunctionType(answer.__code__, answer.__globals__, name, answer.__defaults__)
    assert f"calls the library's own {name}" in str(judge(labs.find_exercise(name), copy))


def test_a_context_manager_has_contextlibs_code_and_is_the_learners():
    answer = labs.find_exercise("no_sync").answer
    mine = contextlib.contextmanager(lambda ddp: iter([None]))
    assert mine.__code__ is answer.__code__ and not is_made_of(mine, answer)
    inner = answer.__wrapped__
    copy = types.FunctionType(inner.__code__, inner.__globals__, "no_sync", inner.__defaults__)
    assert is_made_of(contextlib.contextmanager(copy), answer)


@pytest.mark.parametrize("got, says", [
    (torch.ones(2), ""), (torch.ones(2) + 1e-6, ""), (None, "None"), ([1, 1], "a list"),
    (torch.ones(2) * 2, "2 at element 0, not 1"), (torch.ones(3), "of shape (3,), not (2,)"),
    (torch.ones(2).double(), "torch.float64, not torch.float32"),
    (torch.tensor([1, torch.nan]), "nan at element 1, not 1"),
    (torch.ones(2) + 1e-4, "1.0001 at element 0, not 1"),
])
def test_what_is_not_near_is_told(got, says):
    assert is_near(got, torch.ones(2)) == (not says)
    assert not says or instead(got, torch.ones(2)) == says


INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize("got, right, through, roundings, near", [
    ([1.0, -1e9], [1.0, -INF], None, 0, False), ([1.0, -INF], [1.0, -INF], None, 0, True),
    ([1.0, INF], [1.0, -INF], None, 0, False), ([5.0, -INF], [1.0, -INF], None, 0, False),
    ([1.0, NAN], [1.0, NAN], None, 0, True), ([1.0, 2.0], [1.0, NAN], None, 0, False),
    ([1.0, NAN], [1.0, 2.0], None, 0, False), ([INF], [3.0], None, 0, False),
    ([1 + 1e-7], [1.0], torch.float32, 0, True), ([1 + 1e-7], [1.0], None, 0, False),
    ([1 + 3e-5], [1.0], torch.float32, 0, False), ([1 + 3e-5], [1.0], torch.float32, 600, True),
])
def test_what_is_near(got, right, through, roundings, near):
    got, right = (torch.tensor(each, dtype=torch.float64) for each in (got, right))
    assert is_near(got, right, through, roundings) == near


def test_numbers_that_differ_are_told_with_digits_that_show_it():
    pair = torch.tensor([[0.14291201], [0.142912]], dtype=torch.float64)
    assert instead(*pair) == "0.14291201 at element 0, not 0.142912"
    pair = torch.tensor([0.0, -1e9]), torch.tensor([0.0, -INF])
    assert instead(*pair) == "-1e+09 at element 1, not -inf"


def test_an_error_of_the_learners_names_the_input():
    cell = in_file("<a cell>", "def shard_range(n, rank, size): return n // (size - 1)")
    with pytest.raises(ZeroDivisionError) as raised, trial.inputs_named("shard_range"):
        cell.shard_range(5, 0, 1)
    assert raised.value.__notes__ == ["in shard_range(n=5, rank=0, size=1)"]


SIGNATURES = [  # of a function that is to be as f(x, out=None, *, group=None); what is said
    ("x, out=None, *, group=None", None), ("tensor, out=None, group=None", None),
    ("*args, **kwargs", None), ("x, *more, group=None, fast=True", None), ("x, **more", None),
    ("x, group=None", "has no parameter called out; the stub is "),
    ("x, result=None, group=None", "has no parameter called out"),
    ("x, y, out=None, group=None", "missing a required argument: 'y'"),
    ("out=None, *, group=None", "multiple values for argument 'out'"),
    ("", "has no parameter called out"),
]


@pytest.mark.parametrize("parameters, said", SIGNATURES)
def test_another_signature_than_the_stubs_is_told_as_one(parameters, said):
    def f(x: int, out=None, *, group=None) -> int:
        raise AssertionError("it is never called")

    names = {}
    exec(f"def f({parameters}): pass\nclass C:\n    def f(self, {parameters}): pass", names)
    kind = type("C", (), {"f": f})  # f(x, ...) with x for self: the stub of a method
    names["C"].f = names["f"]
    for answer, learner in ((f, names["f"]), (kind, names["C"])):
        if said is None:
            exercise.refuse_signature(answer, learner)
            continue
        with pytest.raises(Mistake) as mistake:
            exercise.refuse_signature(answer, learner)
        assert said in mistake.value.what and mistake.value.hint == exercise.KEEP


def test_a_signature_is_refused_before_anything_is_launched(monkeypatch):
    monkeypatch.setattr(trial, "launch", None)

    def ring_reduce_scatter(x, group=None):
        return x

    verdict = judge(labs.find_exercise("ring_reduce_scatter"), ring_reduce_scatter)
    assert verdict.holds == []
    assert "ring_reduce_scatter(x, group=None) has no parameter called out" in str(verdict)
