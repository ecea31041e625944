"""The questions as Anki's cards: the file is read back by the rules of Anki's manual."""

import csv
import html
import re

import pytest

from ranklab import cli
from ranklab.course.anki import cards
from ranklab.course.labs import STEMS
from ranklab.interview.ask import draw
from ranklab.interview.bank import load


def read_cards(text):
    """(headers, rows) as Anki reads them: #key:value lines first, then quoted fields."""
    lines = text.splitlines(keepends=True)
    count = next(place for place, line in enumerate(lines) if not line.startswith("#"))
    headers = dict(line[1:].rstrip("\n").split(":", 1) for line in lines[:count])
    assert headers["separator"] == "tab"
    return headers, list(csv.reader(lines[count:], delimiter="\t", strict=True))


def words(text):
    """The text of HTML or of a question, without any space."""
    return "".join(html.unescape(re.sub(r"<[^>]+>|`", "", text)).split())


def test_every_question_is_a_card_with_answer_why_and_slips():
    headers, rows = read_cards(cards(load()))
    assert headers["html"] == "true" and headers["columns"].split("\t")[1:3] == ["Front", "Back"]
    guid, tags = (int(headers[f"{name} column"]) - 1 for name in ("guid", "tags"))
    assert len({row[guid] for row in rows}) == len(rows) == len(load())
    for question, row in zip(load(), rows):
        asked, (front, back) = draw(question), map(words, row[1:3])
        assert len(row) == len(headers["columns"].split("\t"))
        assert all(row[2].count(f"<{tag}>") == row[2].count(f"</{tag}>") for tag in ("p", "li"))
        assert all(words(text) in front for text in (asked.text, *asked.options))
        assert all(words(text) in back for text in (
            asked.shown_answer(), asked.why, *asked.rubric, *(slip for _, slip in asked.wrong)))
        assert row[tags].split() == [f"ranklab::{tag}" for tag in (
            question.lab, f"level-{question.level}", question.kind)]


@pytest.mark.parametrize("lab", [STEMS[0], STEMS[13]])
def test_the_command_writes_a_lab(lab, tmp_path, capsys):
    path = tmp_path / "cards.txt"
    assert cli.main(["questions", "--anki", str(path), "--lab", lab[:2], "--level", "3"]) == 0
    chosen = [one for one in load() if one.lab == lab and one.level == 3]
    assert path.read_text() == cards(chosen) and len(chosen) > 2
    assert f"{len(chosen)} cards in {path}" in capsys.readouterr().out


def test_questions_are_shown_without_their_answers(capsys):
    assert cli.main(["questions", "02", "--level", "2"]) == 0
    printed = capsys.readouterr().out
    asked = [question for question in load() if (question.lab, question.level) == (
        "02_collectives", 2)]
    assert printed.startswith("02_collectives\n")
    assert f"{len(asked)} questions; `ranklab drill --lab 02` asks" in printed
    for question in asked:
        assert f"level 2, {question.id}: " in printed
        assert " ".join(draw(question).text.split()) in " ".join(printed.split())
