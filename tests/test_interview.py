"""The interview bank: the schema holds, every number can be computed, every text fills in."""
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from bank_rules import entry_faults

from ranklab.course.labs import STEMS
from ranklab.course.questions import questions
from ranklab.interview import bank
from ranklab.interview.ask import close, draw, judge
from ranklab.interview.bank import evaluate, load
from ranklab.interview.text import fields
from ranklab.interview.units import dimension, known_unit, read_number, show

BANK = load()
FILES = sorted(Path(bank.__file__).parent.glob("*.yaml"))
NUMBERS, DESIGNS = ([question for question in BANK if question.kind == kind]
                    for kind in ("number", "design"))
LABS = sorted({question.lab for question in BANK})
DRAWS = range(24)


def name(question):
    return question.id


# -- the bank itself

@pytest.mark.parametrize("lab", LABS)
def test_each_lab_has_ten_questions_and_half_are_computed_by_the_library(lab):
    of_lab = [question for question in BANK if question.lab == lab and question.kind != "design"]
    computed = [question for question in of_lab if _calls_the_library(question)]
    assert len(of_lab) >= 10
    assert 2 * len(computed) >= len(of_lab), f"{len(computed)} of {len(of_lab)} call the library"
    assert all(question.parameters for question in computed)
    assert 3 <= sum(question.in_lab for question in of_lab) <= 8
    assert {question.kind for question in of_lab} == {"number", "choice", "open"}


def test_the_first_three_labs_are_there():
    assert {"00_ranks", "01_baseline", "02_collectives"} <= set(LABS) <= set(STEMS)


def test_the_three_designs_are_there_and_their_numbers_are_computed():
    texts = " ".join(question.question for question in DESIGNS)
    assert all(words in texts for words in ("256 H100", "0.9 times", "Which do you buy"))
    for question in DESIGNS:
        said, asked = question.answer.split("Then they ask:")
        assert len(fields(said)) >= 10 and len(asked.strip().split("\n\n")) >= 3
        for text in re.split(r"A (?:junior|senior|staff) engineer says:", said)[1:]:
            assert 5 <= len(re.findall(r"[.?!](?=\s)", text)) <= 13, text


@pytest.mark.parametrize("wanted", [
    "data-or-model-parallelism", "communication-overhead-plan", "stops-at-32",
    "slow-on-several-nodes", "cost-against-mfu", "zero-or-fsdp", "hybrid-four-gpus",
    "hybrid-hundred-billion"])
def test_what_practitioners_are_asked_has_a_rubric_and_a_model_answer(wanted):
    question = next(question for question in BANK if question.id == wanted)
    assert len(question.rubric) >= 4 and len(question.answer.split()) > 100


@pytest.mark.parametrize("question", NUMBERS, ids=name)
def test_number_is_finite_and_apart_from_its_wrong_answers(question):
    for seed in DRAWS:
        asked = draw(question, seed)
        assert math.isfinite(asked.answer)
        numbers = [asked.answer, *(value for value, _ in asked.wrong)]
        for place, one in enumerate(numbers):
            for other in numbers[place + 1:]:
                assert not close(one, other, asked.tolerance), (asked.values, numbers)
        assert judge(asked, asked.answer) == (True, "")
        for value, confuses in asked.wrong:
            assert judge(asked, value) == (False, confuses)


@pytest.mark.parametrize("question", NUMBERS, ids=name)
def test_the_answer_as_shown_is_accepted(question):
    for seed in DRAWS:
        asked = draw(question, seed)
        assert judge(asked, read_number(asked.shown_answer(), asked.unit))[0], asked.shown_answer()


@pytest.mark.parametrize("question", NUMBERS, ids=name)
def test_drawn_parameters_change_the_numbers(question):
    texts = {draw(question, seed).text for seed in DRAWS}
    assert len(texts) > 1 if question.parameters else len(texts) == 1


@pytest.mark.parametrize("question", BANK, ids=name)
def test_texts_fill_in(question):
    for seed in DRAWS:
        asked = draw(question, seed)
        texts = [asked.text, asked.why, *(confuses for _, confuses in asked.wrong)]
        for text in texts + ([] if asked.kind == "number" else [asked.answer]):
            assert "{" not in text and "}" not in text, text
            assert text == text.strip()
        assert not re.search(r"\d\.\d{6}", asked.text), "a float with all its digits"


@pytest.mark.parametrize("question", BANK, ids=name)
def test_a_draw_can_be_repeated(question):
    assert draw(question, 5) == draw(question, 5)


def test_ids_are_kebab_case_and_unique():
    ids = Counter(question.id for question in BANK)
    assert all(count == 1 for count in ids.values())
    assert all(part.isalnum() and part.islower() or part.isdigit()
               for one in ids for part in one.split("-"))


def _calls_the_library(question):
    return question.kind == "number" and bool(question.uses) and any(
        f"{module.split('.')[-1]}." in question.answer for module in question.uses)


# -- the schema: one fault, one sentence

GOOD = {"id": "one", "lab": "00_ranks", "level": 1, "kind": "number", "question": "{n} ranks?",
        "parameters": {"n": [1, 2]}, "answer": "n",
        "wrong": [{"answer": "n + 1", "confuses": "off by one"}]}
CHOICE = {"id": "two", "lab": "00_ranks", "level": 1, "kind": "choice", "question": "which?",
          "answer": "a",
          "wrong": [{"answer": "b", "confuses": "x"}, {"answer": "c", "confuses": "y"}]}
OPEN = {"id": "three", "lab": "00_ranks", "level": 1, "kind": "open", "question": "why?",
        "answer": "so", "rubric": ["one point", "another"]}
DESIGN = {"id": "four", "lab": "00_ranks", "level": 5, "kind": "design", "question": "how?",
          "levels": {"junior": "a", "senior": "b", "staff": "c"}, "follow_up": ["and then?"],
          "rubric": ["one point", "another"]}


@pytest.mark.parametrize("entry", [GOOD, CHOICE, OPEN, DESIGN], ids=lambda entry: entry["kind"])
def test_a_sound_entry_has_no_faults(entry):
    assert entry_faults(entry) == []


@pytest.mark.parametrize("base, change, sentence", [
    (GOOD, {"answer": None}, "`answer` is missing"),
    (GOOD, {"awnser": "n"}, "`awnser` is no field of the bank"),
    (GOOD, {"level": 7}, "level is 7; it must be 1, 2, 3, 4 or 5"),
    (GOOD, {"kind": "essay"}, "kind is 'essay'; it must be one of number, choice, open, design"),
    (GOOD, {"wrong": []}, "a number needs at least one common wrong answer"),
    (GOOD, {"wrong": [{"answer": "3"}]}, "wrong answer 1 needs `answer` and `confuses`"),
    (GOOD, {"unit": "Mbs"}, "the unit 'Mbs' is not one that interview/units.py knows"),
    (GOOD, {"tolerance": 5}, "tolerance is 5; it must be 0 or more and less than 1"),
    (GOOD, {"answer": "m"}, "the answer uses m, which is no parameter and not under `uses`"),
    (GOOD, {"answer": "n +"}, "the answer: 'n +' is not an expression"),
    (GOOD, {"question": "{m} ranks?"}, "question names {m}, which is no parameter"),
    (GOOD, {"question": "{answer} ranks?"}, "question names {answer}, which is no parameter"),
    (GOOD, {"question": "{n ranks?"}, "question has a brace that is no parameter"),
    (GOOD, {"question": "{} ranks?"}, "question has a brace that is no parameter"),
    (GOOD, {"why": "{x}"}, "why names {x}, which is no parameter"),
    (GOOD, {"parameters": {"n": ["1e9"]}}, "parameter n has the text '1e9'; YAML wants 1.0e+9"),
    (GOOD, {"parameters": {"n": []}}, "parameter n must be a list, {from, to} or an expression"),
    (GOOD, {"parameters": {"n": {"from": 1}}}, "parameter n must be a list, {from, to}"),
    (GOOD, {"parameters": {"n": "m", "m": [1]}}, "parameter n uses m, which is no parameter"),
    (GOOD, {"rubric": ["a", "b"]}, "only open questions have a rubric"),
    (CHOICE, {"wrong": CHOICE["wrong"][:1]}, "a choice needs two wrong answers or more"),
    (CHOICE, {"wrong": CHOICE["wrong"][:1] * 2}, "two of its choices are the same"),
    (OPEN, {"rubric": ["only one"]}, "an open question needs a rubric of two points or more"),
    (DESIGN, {"levels": {"junior": "a"}}, "levels has junior; it needs junior, senior, staff"),
    (DESIGN, {"follow_up": []}, "`follow_up` is missing"),
    (DESIGN, {"follow_up": ["{m}?"]}, "the answer names {m}, which is no parameter"),
])
def test_a_fault_is_one_sentence(base, change, sentence):
    faults = entry_faults({**base, **change})
    assert any(sentence in fault for fault in faults), faults
    assert all("\n" not in fault for fault in faults)


def test_the_bank_has_no_faults():
    faults = [f"{path.name}: {entry.get('id')}: {fault}" for path in FILES
              for entry in yaml.safe_load(path.read_text()) for fault in entry_faults(entry)]
    assert not faults


# -- expressions: the bank's own, and what a reader types

def test_expressions_compute():
    assert evaluate("sum({1: n - 1, 2: 3}.values()) / n * 100", {"n": 4}) == 150
    assert read_number("(7 // 2 - -1) ** 2 / 4") == 4


@pytest.mark.parametrize("text", [
    "os", "units.re", "units.read_number('1')", "'a'.upper()", "9 ** 9 ** 9", "(9 ** 150) ** 150",
    "2 ** 3 ** 9", "1e200 ** 2", "0 ** -1", "1.0 % 0", "[0] * 10 ** 9", "'a' * 9",
    "-" * 9000 + "1", "(-8) ** 0.5 // 1", "(-8) ** 0.5", "[1] + [2]", "1 / 0", "1 << 3", "not 1",
    "lambda: 1", "n if n else 1", "f'{n}'", "{**n}", "m.__class__", "max(1, 2)", "2(3)", "()",
    "1 +", ""])
def test_what_is_no_arithmetic_is_refused(text):
    with pytest.raises(ValueError):
        read_number(text)


# -- numbers and units

@pytest.mark.parametrize("text, unit, value", [
    ("1.5e9", "", 1.5e9), ("1,500", "", 1500), ("3/4", "", 0.75), ("-2", "", -2), ("7B", "", 7e9),
    ("150", "MB", 150e6), ("150 MB", "MB", 150e6), ("0.15GB", "MB", 150e6), ("150 mb", "MB", 150e6),
    ("1 GiB", "MB", 2**30), ("8 Gbit", "GB", 1e9), ("2*3/4*100", "MB", 150e6), ("2 ms", "s", 2e-3),
    ("2^20 bytes", "MB", 2**20), ("1.5e8 B", "MB", 150e6), ("3/4", "%", 0.75), ("75", "%", 0.75),
    ("75%", "%", 0.75), ("312 TFLOPS", "TFLOP/s", 312e12), ("6 PFLOP", "TFLOP", 6e15),
    ("3", "messages", 3), ("~12 us", "us", 12e-6), ("8 x", "x", 8), ("$1,000", "USD", 1000)])
def test_numbers_are_read(text, unit, value):
    assert read_number(text, unit) == pytest.approx(value)


@pytest.mark.parametrize("text, unit, sentence", [
    ("many", "", "I cannot read 'many' as a number"), ("", "MB", "I cannot read '' as a number"),
    ("12 parsecs", "MB", "I do not know the unit 'parsecs'; the question asks for MB"),
    ("3 s", "MB", "'s' measures a time; the question asks for a size in MB"),
    ("1/0", "", "I cannot read '1/0' as a number"), ("2 3", "", "I cannot read '2 3' as a number"),
    ("9**9**9", "", "I cannot read"), ("1,5", "", "has a comma")])
def test_numbers_are_refused_with_a_sentence(text, unit, sentence):
    with pytest.raises(ValueError) as caught:
        read_number(text, unit)
    assert sentence in str(caught.value)


def test_numbers_are_shown():
    assert show(150e6, "MB") == "150 MB"
    assert show(0.4375, "%") == "43.75%"
    assert show(16777216) == "16,777,216"
    assert show(8.4e22, "FLOP") == "8.4e22 FLOP"
    assert show(1 / 3) == "0.3333"
    assert known_unit("GB/s") and dimension("B") == "a size" and not known_unit("furlongs")


# -- the questions of a lab

@pytest.mark.parametrize("lab", LABS)
def test_questions_render_the_same_every_time(lab):
    shown = questions(lab)
    assert 3 <= len(shown) <= 8
    page, text = shown._repr_html_(), repr(shown)
    assert page.count("<details>") == page.count("</details>") == len(shown)
    assert (page, text) == (questions(lab)._repr_html_(), repr(questions(lab)))
    for _, asked in shown.pairs:
        assert asked.shown_answer().split("\n")[0][:40].split()[0] in text
    assert "Answer:" in text and "ranklab drill --lab " + lab[:2] in text


def test_questions_of_an_unknown_lab():
    with pytest.raises(ValueError, match="no interview questions for lab '99_none'; there are"):
        questions("99_none")
