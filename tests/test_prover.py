"""The prover itself: what it tells apart, and what it takes for the same."""

import sys
import time

import numpy as np
import pytest
import torch

from ranklab.checks.prover import (
    ALL, Agree, AtMost, InAll, Must, Proof, Slip, Stage, Told, digest, tables,
)
from ranklab.checks.prover.compare import Raised, Seen, differences, is_apart, is_right
from ranklab.checks.prover.facts import fact
from ranklab.checks.prover.observe import observe, unpacked
from ranklab.checks.prover.proof import LIKE
from ranklab.course.check import FAILED, PASSED, judge


def root(x):
    if x < 0:
        raise ValueError(f"{x} has no root")
    return x**0.5


def see(fn, case):
    yield {"the root": fn(case), "its arguments": Must((case,), (case,))}


def by_power(x):
    if x < 0:
        raise ValueError("another message is right")
    return pow(x, 0.5)


SMALL = "Times 2."
ROOT = Proof(root, Stage("roots of numbers of any size", see, (0, 4, 1e-10, -1), oracle=by_power),
             mistakes=(Slip(SMALL, ("x**0.5", "2 * x**0.5")),
                       Slip("Above 1.", ("x**0.5", "x**0.5 if x > 1 else x")),
                       Slip("No root.", ('raise ValueError(f"{x} has no root")', "return 0")),
                       Slip("No table.", ("x**0.5", 'int("a number that no table has")'))),
             hints=("", "", ""))


@pytest.fixture
def built(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "TABLES", tmp_path)
    assert tables.build(ROOT) == []


def test_a_right_function_passes_where_the_oracle_raises(built):
    assert judge(ROOT, by_power).state == PASSED


@pytest.mark.parametrize("slip", ROOT.mistakes, ids=lambda slip: slip.says)
def test_a_mistake_of_small_numbers_is_told_apart(built, slip):
    (fn,) = slip.functions(root)
    verdict = judge(ROOT, fn)
    says_little = slip.says in ("No root.", "No table.")  # one whole number, or an error
    assert (verdict.state, verdict.mistake.hint) == (FAILED, LIKE * says_little + slip.says)


def test_another_mistake_gets_facts_alone(built):
    verdict = judge(ROOT, lambda x: by_power(x) if x > 1 or x < 0 else x / 2)
    assert (verdict.state, verdict.mistake.hint) == (FAILED, "")
    assert "5e-11, not 1e-05" in str(verdict)


def test_an_error_that_is_not_right_is_told(built):
    verdict = judge(ROOT, lambda x: 1 / x if x == 0 else by_power(x))
    assert "it raised ZeroDivisionError" in str(verdict)


def test_an_endless_loop_ends_at_the_limit_of_the_whole_check(built, monkeypatch):
    monkeypatch.setattr(sys.modules["ranklab.course.check"], "LIMIT", 0.3)

    def endless(x):
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                pass

    verdict = judge(ROOT, endless)
    assert (verdict.state, verdict.mistake.what) == (FAILED, "it was not done after 0.3 s")


@pytest.mark.parametrize("number, is_over", [(3, False), (3.5, True), (float("nan"), True)])
def test_a_cost_may_be_at_most_its_limit(number, is_over):
    assert is_apart(ROOT.stages[0], AtMost(number, 3), AtMost(0, 3)) == is_over


def test_an_array_for_a_list_is_not_what_must_be_and_breaks_nothing():
    for got in ([], np.array([]), np.array([1, 2]), {"a": np.array([1, 2])}):
        assert is_apart(ROOT.stages[0], Must(got, []), Must([], [])) == (not isinstance(got, list))


def test_ranks_agree_where_the_first_has_the_same_tensor():
    stage = Stage("sums", None, ("a",), ranks=(2,))

    def wrong(first, other):
        shown = [{(0, 0): Seen("", (0, 1), {"sum": Agree(each)})} for each in (first, other)]
        return differences(stage, shown, shown).get(((0, 0), "sum"), [])

    one = torch.ones(1)
    assert wrong(one, one) == []
    assert wrong(one, None) == wrong(one, 2 * one) == wrong(one, one.double()) == [1]
    assert wrong(None, one) == [0, 1]


@pytest.mark.parametrize("values, is_little", [
    ([[3, 2], [4, 3, 2, 1]], False), (["not the same"] * 6, True), ([24.0] * 6, True),
    ([True, True, 1, 2, 3], True), ([True, 1, 2, 3, 1], False), ([None], True),
    ([{"float32 3": [1.0, 1.0, 1.0, 1.0]}], False), (["KeyError: " + 90 * "x"] * 6, True),
    ([1.23456], False), (["a text that only one mistake can show, for it is long"], False)])
def test_few_short_values_or_one_word_or_an_error_tell_little(values, is_little):
    items = [[[step, 0], "the value", [0], [value]] for step, value in enumerate(values)]
    assert digest.tells_little(items) == is_little


def of_tensor(*numbers, dtype=torch.float32):
    return digest.of_value(torch.tensor(numbers, dtype=dtype))


def test_digests_differ_by_more_than_rounding_only():
    assert digest.is_alike(of_tensor(1, -1), of_tensor(1, -1 + 1e-6))
    assert not digest.is_alike(of_tensor(1, -1), of_tensor(-1, 1))
    assert not digest.is_alike(of_tensor(1, -1), of_tensor(1, -1, dtype=torch.float64))
    assert not digest.is_alike(of_tensor(1e-6, 2), of_tensor(2, 1e-6))
    assert digest.is_alike(of_tensor(3, 4, dtype=torch.bfloat16),
                           of_tensor(3, 4.03, dtype=torch.bfloat16))
    assert not digest.is_alike(digest.of_value(1e-6), digest.of_value(2e-6))
    assert digest.is_alike(digest.of_value(1e-6), digest.of_value(1e-6 * (1 + 1e-6)))


def test_weights_of_a_digest_tell_every_order_apart():
    orders = [torch.randperm(8, generator=torch.Generator().manual_seed(seed)).float()
              for seed in range(50)]
    digests = [digest.of_value(order) for order in orders]
    assert not any(digest.is_alike(one, other)
                   for i, one in enumerate(digests) for other in digests[:i])


def test_digests_of_whole_numbers_are_exact():
    one = list(range(1000))
    other = [*one[:500], 501, *one[501:]]
    for kind in (tuple, torch.tensor, lambda each: [[None, "a"], each]):
        assert digest.is_alike(digest.of_value(kind(one)), digest.of_value(kind(one)))
        assert not digest.is_alike(digest.of_value(kind(one)), digest.of_value(kind(other)))


@pytest.mark.parametrize("one, other", [
    ("RuntimeError: [enforce fail at /a/pair.cc:801] state_ >= CONNECTED. . ([127.0.0.1]:4321)",
     "RuntimeError: [enforce fail at /b/pair.cc:799] state_ >= CONNECTED. . ([127.0.0.1]:65000)"),
    ("died at /tmp/x1: got 0x7f00 (100 vs. 25)", "died at /tmp/yz: got 0x8a10 (4 vs. 252)")])
def test_a_digest_holds_nothing_of_an_errors_chance(one, other):
    shown = [digest.of_value(Raised("RuntimeError", text, text)) for text in (one, other)]
    assert shown[0] == shown[1] and len(shown[0]) > 10


def test_what_must_be_may_be_told_and_what_is_missing_is_said():
    def see_it(fn, case):
        told = Told(fn(case), lambda got, due: f"{got} of {due}")
        yield {"the length": Must(told, 3)} | ({} if case == "abc" else {"the cost": AtMost(1, 1)})

    proof = Proof(len, Stage("lengths", see_it, ("abc", "abcd"), oracle=lambda case: 3),
                  mistakes=(), hints=("", "", ""))
    (stage,) = proof.stages
    right, shown = observe(stage, 0, lambda case: 3, lambda case: 4)
    assert fact(stage, shown, right, (0, 0), "the length", 0) == "abc: the length is 4 of 3"
    shown[0][1, 0].values.pop("the cost")
    assert [*differences(stage, shown, right)] == [((0, 0), "the length"), ((1, 0), "the length"),
                                                   ((1, 0), "the cost")]
    assert fact(stage, shown, right, (1, 0), "the cost", 0) == "abcd: the cost is not there"


def test_of_a_list_of_tensors_the_first_wrong_one_is_told():
    def parameters(factor):
        return lambda case: [torch.arange(3.), factor * torch.arange(1., 4.)]

    def see_parameters(fn, case):
        yield {"the parameters": fn(case)}

    proof = Proof(len, Stage("steps", see_parameters, ("x",), oracle=parameters(1)),
                  mistakes=(), hints=("", "", ""))
    (stage,) = proof.stages
    right, shown = observe(stage, 0, parameters(1), parameters(2))
    assert fact(stage, shown, right, (0, 0), "the parameters", 0) == (
        "x: number 1 of the parameters is 6 at element 2, not 3")
    shown[0][0, 0].values["the parameters"] = [torch.arange(3.), torch.zeros(3)]
    assert fact(stage, shown, right, (0, 0), "the parameters", 0) == (
        "x: number 1 of the parameters is zeros")


def test_a_check_that_fails_its_own_answer_stops_the_build(tmp_path, monkeypatch):
    def see_key(fn, case):
        yield {"the root": fn(case)["root"]}

    monkeypatch.setattr(tables, "TABLES", tmp_path)
    proof = Proof(root, Stage("roots", see_key, (4,)), mistakes=(), hints=("", "", ""))
    with pytest.raises(tables.PassingMistake, match="what is right raises TypeError"):
        tables.build(proof)


def test_what_depends_on_other_ranks_is_not_right_by_what_one_rank_knows():
    stage = Stage("bytes", None, ("a",), ranks=(2,))
    for value, is_so in ((AtMost(3, 4), True), (AtMost(5, 4), False), (InAll(3, 4), False),
                         (Agree(torch.ones(1)), False)):
        of_rank = {(0, 0): Seen("rank 0", (0, 1), {"bytes": value})}
        assert is_right(stage, of_rank, of_rank) == is_so
    assert not is_right(stage, {}, of_rank)


def test_a_rank_may_be_in_no_group():
    def index_of(ranks):
        return ranks.index

    def see_index(fn, case, ranks):
        yield {"the index": fn(ranks)}

    stage = Stage("indices", see_index, ("a",), ranks=(3,), groups=(((0, 2),), ALL))
    right, shown = observe(stage, 3, index_of, lambda ranks: ranks.members[ranks.index])
    assert observe(stage, 3, index_of, index_of, right)[1] is None  # no rank sees a difference
    right = unpacked(right)
    assert [[*of_rank] for of_rank in right] == [[(0, 0), (1, 0)], [(1, 0)], [(0, 0), (1, 0)]]
    assert differences(stage, shown, right) == {((0, 0), "the index"): [2]}
    assert stage.case_name(0) == "a, in the groups [0, 2]"
