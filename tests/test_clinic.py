"""Lab 16: its text shows the programs and causes that the library has; the ward finds diseases."""

import re

import jupytext
import pytest
from conftest import ROOT

from ranklab.clinic.all_cases import CASES
from ranklab.course import labs
from ranklab.projects.clinic import report, visit

TEXT = (ROOT / "labs" / "source" / "16_clinic.py").read_text()
CELLS = jupytext.reads(TEXT, fmt="py:percent").cells
# In `make test` a case of each kind; the rest in the sweep, and in the solved lab.
FEW = "train_until_good", "moving_curve", "wide_layer", "resumed_digits"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_lab_shows_the_program_as_it_was_found_and_its_causes(case):
    assert case.broken_source().strip() in [cell.source for cell in CELLS]
    at = TEXT.index(f"check(clinic_{case.name}_cause=...)")
    told = re.findall(r"^# (\d)\. (.*)$", TEXT[:at], re.M)[-len(case.choices):]
    assert [words.rstrip(".") for _, words in told] == [each.rstrip(".") for each in case.choices]
    assert [int(number) for number, _ in told] == [*range(1, len(told) + 1)]
    prediction, = [each for each in labs.checks_of("16_clinic").PREDICTIONS
                   if each.name == f"clinic_{case.name}_cause"]
    assert prediction.answer() == case.cause and len(prediction.mistakes) == len(told) - 1


def test_every_disease_has_a_case_and_each_case_another_name():
    assert len({case.disease for case in CASES}) == len({case.name for case in CASES}) == 21


def swept(case):
    return [] if case.name in FEW else [pytest.mark.sweep]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=swept(case))
                                  for case in CASES])
def test_the_ward_finds_a_disease_and_calls_nobody_sick_who_is_well(case):
    seen = [visit(case, form) for form in ("found", "variant", "mended")]
    missed = [each for each in seen if not each.is_right()]
    # One run does not show that its rate was meant for another number of ranks.
    known = [each for each in seen if case.disease == "learning_rate" and each.disease]
    assert missed == known, report(seen)
