"""TEACHING.md's agendas and README.md's paths take the minutes that their labs state."""

import itertools
import re
from collections import Counter

import agendas
import pytest
from conftest import ROOT

from ranklab.course import labs
from ranklab.course.interview import MINUTES
from ranklab.interview.bank import load

TEACHING = (ROOT / "TEACHING.md").read_text()
SECTIONS = dict(re.findall(r"^### ([^\n]*\))[^\n]*\n(.*?)(?=^##)", TEACHING, re.M | re.S))
DAY = 7 * 60


def days(text):
    """Of each table: [(minute at which it begins, what, what to do)]."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        rows = re.findall(r"^\| (\d+):(\d\d) \| (\w+) \| (.*?) \|", table, re.M)
        if rows:
            yield [(60 * int(hour) + int(minute), what, do) for hour, minute, what, do in rows]


def slots():
    for title, text in SECTIONS.items():
        for day in days(text):
            for (begins, what, do), (ends, *_) in itertools.pairwise([*day, (None, None)]):
                if what in labs.STEMS:
                    yield pytest.param(what, do, ends and ends - begins, id=f"{title}-{what}-{do}")


def term():
    """[(week, lab, what to do, minutes, what is left for home)]"""
    text = next(text for title, text in SECTIONS.items() if title.startswith("A term"))
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (.*?) \| (\d+) \| (.*?)\|$", text, re.M)
    return [(int(week), lab, do, int(took), home) for week, lab, do, took, home in rows]


@pytest.mark.parametrize("stem, do, took", [*slots()])
def test_a_slot_is_what_the_lab_states(stem, do, took):
    assert took in (None, agendas.slot(stem, do))  # None: the day ends with it


def test_no_day_is_longer_than_it_says():
    hours = {"Half a day": 4 * 60}
    for title, text in SECTIONS.items():
        for day in days(text):
            begins, what, do = day[-1]
            ends = begins + (agendas.slot(what, do) if what in labs.STEMS else 1)
            assert ends <= hours.get(title.partition(" (")[0], DAY), title


def test_five_days_hold_all_labs():
    held = {what for title, text in SECTIONS.items() if not title.startswith(("Half", "A term"))
            for day in days(text) for _, what, _ in day}
    assert set(labs.STEMS) <= held


def test_the_term_holds_all_labs_and_fits_its_sessions():
    weeks, longest = map(int, re.search(r"A term \((\d+) weeks of (\d) hours\)", TEACHING).groups())
    taken = Counter()
    for week, lab, do, took, home in term():
        assert took == agendas.slot(lab, do), f"week {week}, {lab}: {agendas.slot(lab, do)}"
        taken[week] += took
        if not do.startswith("case"):  # what is not done in class is done at home
            core = {name for name in agendas.stated(lab)[2] if name.startswith("4.")}
            assert {*agendas.sections(do), *agendas.sections(home)} == core, f"week {week}, {lab}"
    assert sorted(taken) == list(range(1, weeks + 1))
    assert max(taken.values()) + 10 <= longest * 60  # a break of ten minutes
    assert taken[weeks] + 10 + 45 <= longest * 60  # and the mock interview at the end
    assert {lab for _, lab, *_ in term()} == set(labs.STEMS)


# --- README's paths ---------------------------------------------------------------------------

README = (ROOT / "README.md").read_text()
PATHS = re.findall(r"^\*\*(I .*?)\*\* \((\d+) h (\d+) min\)(.*?)(?=^\*\*I |^## )", README,
                   re.M | re.S)


@pytest.mark.parametrize("title, hours, minutes, text", PATHS, ids=[path[0] for path in PATHS])
def test_a_path_takes_what_its_labs_drills_and_interviews_take(title, hours, minutes, text):
    taken = re.findall(r"\b(\d\d) \((\w[^)]*)\)", text)
    found = sum(agendas.up_to_five(agendas.minutes(*lab)) for lab in taken)
    if drill := re.search(r"ranklab drill --lab \d\d --count (\d+)", text):
        bank = [MINUTES[question.kind] for question in load() if question.kind != "design"]
        found += len(taken) * agendas.up_to_five(int(drill[1]) * sum(bank) / len(bank))
    found += sum(int(said or 45) for said in
                 re.findall(r"`ranklab interview --level \d(?: --minutes (\d+))?`", text))
    assert divmod(found, 60) == (int(hours), int(minutes))


def test_there_is_a_path_for_each_reader():
    assert [path[0] for path in PATHS] == [
        "I have one GPU", "I interview in two weeks", "I operate a cluster", "I teach"]
    assert all("**You then have** " in path[3] for path in PATHS)
