"""A class is graded twice with equal files, and its report names mistakes and injects nothing."""

import tempfile
from html.parser import HTMLParser

import pytest
from class_of_30 import KINDS, STEMS, write_class
from test_grade import left_over

from ranklab.course import labs
from ranklab.course.class_page import page
from ranklab.course.grade import grade
from ranklab.course.lesson import places
from ranklab.course.mistakes import common, to_tell
from ranklab.course.submission import Row

ANSWER = labs.find_exercise("ring_shift").hints[0]
SENDS = "All ranks wait in send: gloo's send returns only when the other side receives."
EVIL = "\"'><img src=x onerror=alert(1)></td></table><script>alert(1)</script>\u202e\x00"


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where the notebooks run."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def graded_twice(tmp_path, limit):
    """(table, report): both gradings of tmp_path/in gave these bytes."""
    found = []
    for turn in "ab":
        table, report = tmp_path / f"{turn}.csv", tmp_path / f"{turn}.html"
        assert grade(tmp_path / "in", table, limit, report) == 0
        found.append((table.read_text(), report.read_text()))
    assert found[0][0].splitlines() == found[1][0].splitlines()
    assert found[0] == found[1]
    return found[0]


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_a_small_class_twice(tmp_path, scratch):
    write_class(tmp_path / "in", stems=["09_pipeline_parallel"], most=1,
                kinds={"good": 1, "wrong": 1})
    table, report = graded_twice(tmp_path, limit=200)
    rows = {line.partition(".ipynb")[0].rpartition("/")[2]: line.split(",")
            for line in table.splitlines()[1:]}
    assert [row[2] for row in rows.values()] == ["2", "0"], rows
    sentences = {slip.says for slip in labs.find_exercise("gpipe_schedule").mistakes}
    assert sentences.intersection(Parsed(report).texts)
    assert left_over(scratch) == [] and list(scratch.iterdir()) == []


@pytest.mark.sweep
@pytest.mark.timeout(7200)
def test_the_whole_class_twice(tmp_path, scratch):
    write_class(tmp_path / "in")
    table, report = graded_twice(tmp_path, limit=300)
    lines = table.splitlines()[1:]
    assert len(lines) == len(STEMS) * sum(KINDS.values()) == 30
    for line in lines:
        name, _, passed, of, *_ = line.split(",")
        kind = name.partition("/")[2].partition("_")[0]
        right = {"good": passed == of, "half": 0 < int(passed) < int(of),
                 "wrong": int(passed) < int(of)}
        assert right[kind], line
    assert Parsed(report).texts
    assert left_over(scratch) == [] and list(scratch.iterdir()) == []


class Parsed(HTMLParser):
    """The tags, the attributes and the texts of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts = set(), set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.texts.append(data)


def row(name, **said):
    """A submission of lab 00 that failed in these: exercise=(what was seen, the hint)."""
    one = Row(f"{name}.ipynb", "00_ranks")
    for exercise in labs.names_of("00_ranks"):
        one.set(exercise, *("failed", *said[exercise]) if exercise in said else ("passed",))
    return one


def test_nothing_that_is_handed_in_becomes_html():
    plain = Parsed(page([row("ann", ring_shift=("it hangs", SENDS))]))
    evil = row(EVIL, ring_shift=(EVIL, EVIL), shard_range=(EVIL * 10_000, ""))
    evil.notes.append(EVIL)
    text = page([evil, row("bob")])
    found = Parsed(text)
    assert found.tags - {"ul"} == plain.tags and found.attributes == plain.attributes
    assert "<img" not in text and "<script" not in text and "\u202e" not in text
    assert EVIL[:-2] + "??" in found.texts, "but it can be read"
    assert len(text) < 50_000, "long texts are cut"
    assert "://" not in text and "url(" not in text and "default-src 'none'" in text


def test_the_same_mistake_of_two_is_one_whatever_its_numbers():
    rows = [row("ann", shard_range=("n=7, size=2: nobody has 6", "Hand out 1 more.")),
            row("bob", shard_range=("n=9, size=4: nobody has 8", "Hand out 3 more.")),
            row("eve", shard_range=("n=9, size=4: nobody has 8", "Begin at 0.")),
            row("dan", ring_shift=("it raised NameError: name 'gruop' is not defined", "")),
            row("fay", ring_shift=("it raised NameError: name 'rnak' is not defined", "")),
            row("gil", ring_shift=("it raised KeyError: 'a'", ""),
                shift_bytes=("4000 B: for one rank", "for one rank"))]
    found = common(rows)
    assert [(each.name, len(each.by)) for each in found] == [
        ("shard_range", 2), ("ring_shift", 2), ("shard_range", 1), ("ring_shift", 1),
        ("shift_bytes", 1)]
    told = to_tell(found)
    assert [each.name for each in told] == ["shard_range", "ring_shift", "shard_range",
                                            "shift_bytes"]
    why = labs.find_prediction("shift_bytes").why
    assert [each.to_say() for each in told] == ["Hand out 1 more.", ANSWER, "Begin at 0.", why]


def test_lists_of_ranks_and_types_are_compared_as_they_should():
    def names(*seen):
        return len(common([row(str(n), ring_shift=(one, "")) for n, one in enumerate(seen)]))

    assert names("ranks 0 and 2 wait", "ranks 0, 1 and 3 wait") == 1
    assert names("[1, 2, 3] was lost", "[4] was lost", "1e-05 was lost", "nan was lost") == 1
    assert names("it is float32", "it is float64") == 2
    assert names("rank 0's x, the sum's y", "rank 1's x, the mean's y") == 2, "no quotes"


def test_the_rank_that_was_first_to_fail_is_not_named():
    one = row("ann", ring_shift=("on 4 ranks, rank 3 of 4 raised RuntimeError: rank 3 of 4", ""))
    assert one.reasons["ring_shift"] == "on 4 ranks, a rank of 4 raised RuntimeError: rank 3 of 4"


def test_the_lesson_is_where_the_lab_teaches_it():
    assert places("00_ranks", "shard_range") == [
        "Lab 00, section 4.1 Which part is mine?",
        "the picture below it in the solved lab, plots.shards",
        'the slide "Which part is mine?"']
    for stem in labs.written():
        for name in labs.names_of(stem):
            assert places(stem, name), name


def test_a_class_of_which_nothing_is_known_still_has_a_report():
    text = page([Row("torn.ipynb", notes=["unreadable: it is not JSON"])])
    assert "No mistake was found." in text and "it is not JSON" in text
