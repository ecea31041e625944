"""Lab 16: the wrong trainings show what their story tells, and so do their other forms."""

import pytest
import torch

from ranklab import launch
from ranklab.clinic.all_cases import CASE
from ranklab.meter import Traffic

pytestmark = [pytest.mark.timeout(120), pytest.mark.sweep]  # a story's numbers


def results(program, *settings, ranks=4):
    return launch(program, *settings, ranks=ranks)


def differ(found, name):
    return [not torch.equal(each[name], found[0][name]) for each in found]


def test_long_steps_are_longer_than_allowed_and_without_clipping_a_sum():
    broken, variant = CASE["long_steps"].broken(), CASE["long_steps"].variant()
    longest = [results(broken, ranks=ranks)[0]["longest"] for ranks in (1, 2, 4)]
    assert [round(each, 3) for each in longest] == [0.05, 0.071, 0.094]
    for program in (broken, variant):
        one, _, four = ([each["longest"] for each in results(program, 1, 0.5, 1e9, ranks=ranks)]
                        for ranks in (1, 2, 4))
        assert four == pytest.approx([4 * one[0]] * 4)


def test_a_saved_model_is_another_than_the_other_ranks_have():
    found = results(CASE["saved_model"].broken())
    assert [round(each["loss"], 2) for each in found] == [1.72, 1.31, 1.31, 1.31]
    assert round(results(CASE["saved_model"].broken(), ranks=1)[0]["loss"], 2) == 1.19
    moved = [each["weights"] - each["start"] for each in found]
    assert all((each - moved[0]).abs().max() < 1e-6 for each in moved)
    assert differ(results(CASE["saved_model"].variant()), "start") == [False, True, True, True]


def test_no_faster_is_one_rank_four_times():
    found = results(CASE["no_faster"].broken())
    assert all(each["seen"] == found[0]["seen"] for each in found)
    assert [len(epoch) for epoch in found[0]["seen"]] == [60, 60]
    one, = results(CASE["no_faster"].broken(), 2, 24, ranks=1)
    assert torch.allclose(one["weights"], found[0]["weights"])
    shared = [each["seen"] for each in results(CASE["no_faster"].variant())]
    assert shared[0] == shared[1] != shared[2] == shared[3]


def test_worse_together_has_the_rates_of_one_rank():
    found = {name: results(program)[0] for name, program in (
        ("mended", CASE["worse_together"].program), ("broken", CASE["worse_together"].broken()),
        ("variant", CASE["worse_together"].variant()))}
    assert found["broken"]["loss"] == pytest.approx(1.35, abs=0.01)
    assert results(CASE["worse_together"].broken(), ranks=1)[0]["loss"] == pytest.approx(0.84, 0.01)
    rates = {name: each["rates"] for name, each in found.items()}
    assert (max(rates["mended"]), rates["mended"][-1]) == pytest.approx((0.09, 0.00333), rel=0.01)
    assert (max(rates["broken"]), rates["broken"][-1]) == pytest.approx((0.03, 0.0227), rel=0.01)
    assert (max(rates["variant"]), rates["variant"][-1]) == pytest.approx((0.03, 8e-4), rel=0.05)
    assert results(CASE["worse_together"].broken(), 16, ranks=4)[0]["loss"] < 0.84  # as it is told


def test_two_scores_differ_though_the_weights_are_equal():
    found = results(CASE["two_scores"].broken())
    assert len({each["score"] for each in found}) > 1 and not any(differ(found, "weights"))
    found = results(CASE["two_scores"].variant())
    assert len({each["loss"] for each in found}) > 1 and not any(differ(found, "weights"))


def test_moving_curve_moves_with_ranks_and_pieces():
    broken, variant = CASE["moving_curve"].broken(), CASE["moving_curve"].variant()
    first = {(ranks, pieces): results(broken, 1, 24, pieces, ranks=ranks)[0]["losses"].item()
             for ranks, pieces in ((1, 1), (1, 2), (2, 2), (4, 2))}
    assert len({*first.values()}) == 4, first
    curve, other = (results(variant, 2, 24, 2, ranks=ranks)[0]["losses"] for ranks in (1, 4))
    assert (curve - other).abs().min() > 1e-3


def counted(program):
    with Traffic() as traffic:
        program()
    return traffic.calls


@pytest.mark.parametrize("name, calls", [("no_faster", 240), ("saved_model", 80)])
def test_gradients_are_reduced_once_a_step(name, calls):
    assert [each["all_reduce"] for each in results(counted, CASE[name].broken())] == [calls] * 4
