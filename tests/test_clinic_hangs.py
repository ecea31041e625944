"""Lab 16, the group hangs: the programs show what is told of them, for the reason that is said."""

import pytest

from ranklab.checks.clinic.slowdowns import work_counted
from ranklab.clinic.case import edited_program
from ranklab.clinic.hangs import CASES
from ranklab.engine import HangError, launch
from ranklab.meter import Traffic

OWNERS, GRID, GOOD, LARGE, FUNCTIONS = CASES
PRELOAD = "sklearn.datasets",


def run(program, ranks=4, **settings):
    return launch(lambda: program(**settings), ranks=ranks, stall=1, preload=PRELOAD)


def hang(program, ranks=4, **settings):
    with pytest.raises(HangError) as caught:
        run(program, ranks, **settings)
    return list(caught.value.failures.values())


def sent(program, **settings):
    """(bytes, calls) that a rank gives to all-reduces."""
    def counted():
        with Traffic() as traffic:
            program(**settings)
        ops = [op for op in traffic.ops if op.name == "all_reduce"]
        return sum(op.payload_bytes for op in ops), len(ops)
    return launch(counted, ranks=4)[0]


def tokens(program):
    """Of each rank, in training and evaluation."""
    def counted():
        with work_counted() as found:
            program()
        return found["tokens"].total()
    return launch(counted, ranks=4)


def test_owners_stand_still_all_in_one_line_and_with_one_rank_not():
    assert hang(OWNERS.broken()) == hang(OWNERS.variant()) == ["broadcast"] * 4
    assert run(OWNERS.broken(), ranks=1)[0]["right"] == run(OWNERS.program, 1)[0]["right"]


def test_owners_that_get_through_do_not_agree_on_the_counts():
    counting = edited_program(OWNERS.program, OWNERS.edits[1:])
    found, mended = ([each["right"] for each in run(program)] for program in (counting,
                                                                             OWNERS.program))
    assert found[0] != found[1] and mended == [mended[0]] * 4 != found


def test_four_on_a_grid_wait_in_a_circle_and_two_do_not():
    assert hang(GRID.broken()) == hang(GRID.variant()) == ["all_reduce"] * 4
    for tensor in (1, 2):
        assert run(GRID.broken(), 2, tensor=tensor, steps=2)[0]["log"]


def test_one_rank_is_done_and_the_others_wait_for_it():
    seen = [hang(program, ranks) for program in (GOOD.broken(), GOOD.variant()) for ranks in (3, 4)]
    assert all(0 < doing.count("returned") < len(doing) for doing in seen)
    assert run(GOOD.broken(), ranks=1)[0]["steps"] < 40


def test_eight_times_the_bytes_and_calls_of_what_is_mended():
    nbytes, calls = sent(LARGE.program)
    assert sent(LARGE.broken()) == (8 * nbytes, 8 * calls)
    assert sent(LARGE.program, accumulate=1) == (8 * nbytes, 8 * calls)  # no more than without
    assert sent(LARGE.variant())[0] > 7.9 * nbytes


def test_the_last_rank_has_nearly_half_of_all_tokens():
    for program in (FUNCTIONS.broken(), FUNCTIONS.variant()):
        found = tokens(program)
        assert max(found) == found[3] > 2.5 * sorted(found)[1]
        assert found[3] > 0.48 * sum(found)
    found = tokens(FUNCTIONS.program)
    assert max(found) < 1.2 * min(found)
