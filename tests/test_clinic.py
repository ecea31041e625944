"""The labs show the programs and causes that the library has; the ward finds diseases."""

import re

import jupytext
import pytest
from conftest import ROOT

from ranklab import launch
from ranklab.clinic import flight
from ranklab.clinic.all_cases import CASE, CASES
from ranklab.clinic.case import compiled_program, edited_program, edited_source
from ranklab.course import labs
from ranklab.course.check import FAILED, PASSED, judge
from ranklab.projects.clinic.ward import FORMS, report, visit

LIST = re.compile(r"^# <details><summary>.*</summary>\n#\n((?:# \d\. .*\n)+)#\n# </details>$", re.M)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_lab_shows_the_program_as_it_was_found_and_its_causes(case):
    stem = labs.stem_of(case.name)
    text = (ROOT / "labs" / "source" / f"{stem}.py").read_text()
    cells = jupytext.reads(text, fmt="py:percent").cells
    assert case.broken_source().strip() in [cell.source for cell in cells]
    asked = text[:text.index(f"check(clinic_{case.name}_cause=...)")].rpartition("**Why?**")[2]
    folded, = LIST.findall(asked)  # what the learner thinks comes first
    told = re.findall(r"^# (\d)\. (.*)$", folded, re.M)
    assert [words.rstrip(".") for _, words in told] == [each.rstrip(".") for each in case.choices]
    assert [int(number) for number, _ in told] == [*range(1, len(told) + 1)]
    prediction = labs.find_prediction(f"clinic_{case.name}_cause")
    assert prediction in labs.checks_of(stem).PREDICTIONS
    assert prediction.answer() == case.cause and len(prediction.mistakes) == len(told) - 1


def test_every_disease_has_a_case_and_each_case_another_name():
    assert len({case.disease for case in CASES}) == len({case.name for case in CASES}) == 21


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_untouched_program_is_refused_without_a_word_of_its_cause(case):
    exercise = labs.find_exercise(case.name)
    verdict = judge(exercise, compiled_program(case.program, f"# mine\n\n{case.broken_source()}"))
    assert exercise.answer is case.program and verdict.state == FAILED and not verdict.holds
    assert "as you found it" in verdict.mistake.what


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["gathered_model", pytest.param(
    "stored_digits", marks=pytest.mark.sweep)])
def test_a_program_may_have_another_name(name):
    """As where a learner keeps the broken one beside it."""
    exercise, case = labs.find_exercise(name), CASE[name]

    def judged(text):
        renamed = text.replace(f"def {name}(", "def mended(")
        return judge(exercise, compiled_program(case.program, f"{renamed}\n\n{name} = mended\n"))

    right = judged(f"# mine\n\n{edited_source(case.program, ())}")
    assert right.state == PASSED, right
    assert "as you found it" in judged(case.broken_source()).mistake.what


@pytest.mark.timeout(120)
def test_the_report_of_a_hang_says_that_a_rank_may_be_in_a_later_call():
    exercise = labs.find_exercise("train_with_owners")
    half = edited_program(exercise.answer, CASE["train_with_owners"].edits[1:])
    verdict = judge(exercise, half)
    assert "a rank that is done with one call is already in the next one" in verdict.mistake.what


@pytest.mark.timeout(120)
def test_a_round_says_what_is_found_what_is_missed_and_who_is_well():
    """test_clinic_diagnose.py looks at all programs."""
    seen = [visit(case, form) for case in CASES for form in FORMS
            if case.name in ("moving_curve", "worse_together")]
    said = report(seen)  # one run does not show that its rate was meant for other ranks
    assert said.count("MISS worse_together") == 2 and said.count("ok  ") == 4
    assert "found: 2 of 4 sick programs; false alarms: 0 of 2" in said


@pytest.mark.parametrize("detector, name", [("circle_of_waits", "train_on_a_grid"),
                                            ("own_limit", "flat_model")])
def test_a_round_uses_the_detectors_that_it_is_given(detector, name):
    case, = (case for case in CASES if case.name == name)
    asked = []
    found = visit(case, **{detector: lambda seen: asked.append(seen) or []}).diagnosed
    assert asked and case.disease not in found and case.disease in visit(case).diagnosed


def test_the_recorded_dumps_are_what_ranks_that_hang_write_and_torch_reads_them(tmp_path):
    marks, files = tmp_path / "marks", tmp_path / "files"
    marks.mkdir()
    files.mkdir()
    dumps, recorded = launch(flight._hung_grid, marks, ranks=4), flight.read_dumps()
    for rank, dump in enumerate(dumps):
        for name in ("process_group", "collective_seq_id", "retired", "input_sizes"):
            calls = [[entry[name] for entry in each["entries"]] for each in (dump, recorded[rank])]
            assert calls[0] == calls[1], (rank, name)
    assert flight.not_waiting(recorded) == [2]
    groups = {"0": range(4), "1": (0, 1), "2": (2, 3), "3": (0, 2), "4": (1, 3)}
    flight.write_as_nccl(recorded, groups, files)
    assert flight.torchs_verdict(files) == [("2", 6, "{2}"), ("3", 3, "{2}"), ("4", 3, "{3}")]
