"""What is kept of a learner's work, and what `ranklab status` says of it: nothing is ever lost."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ranklab import check, cli, hint
from ranklab.course import index, index_builder, labs, outline, progress, spine
from ranklab.course.check import FAILED, PASSED
from ranklab.course.drill import Marks
from ranklab.course.status import status

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Records of this test only."""
    monkeypatch.setenv("RANKLAB_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def states():
    return {name: entry["state"] for name, entry in progress.load().items()}


# --- records --------------------------------------------------------------------------------------

def test_a_pass_is_never_lost():
    for state in (FAILED, PASSED, FAILED):
        progress.record("a", state)
    assert progress.load()["a"]["state"] == PASSED and progress.load()["a"]["tries"] == 3


@pytest.mark.parametrize("content", ["", '{"a": {"sta', "[]", "null", '{"a": 3}', "\x00\xff",
                                     '{"a": {"state": "passed", "tries": "many"}}',
                                     '{"a": {"state": "passed", "tries": 1, "hints": "two"}}',
                                     '{"a": {"state": "passed", "tries": 1, "cell": 3}}'])
def test_a_file_that_cannot_be_read_is_kept_aside_with_a_sentence(home, content, capsys):
    home.mkdir()
    (home / "progress.json").write_text(content, encoding="latin-1")
    assert progress.load() == {} == progress.load()
    assert capsys.readouterr().out == (f"({home}/progress.json could not be read whole: "
                                       "0 records are kept, the old file is progress.bad.json)\n")
    assert (home / "progress.bad.json").read_text(encoding="latin-1") == content
    progress.record("b", PASSED)
    assert states() == {"b": PASSED} and capsys.readouterr().out == ""


def test_one_bad_record_costs_no_other(home, capsys):
    home.mkdir()
    content = {"a": {"state": PASSED, "tries": 2}, "bad": {"state": PASSED}, "worse": 3}
    (home / "progress.json").write_text(json.dumps(content))
    progress.record("b", FAILED)
    assert states() == {"a": PASSED, "b": FAILED} and progress.load()["a"]["tries"] == 2
    assert capsys.readouterr().out.count("2 records are kept, the old file is progress.bad") == 1
    assert json.loads((home / "progress.bad.json").read_text()) == content


def _home_is_a_file(home):
    home.write_text("")


def _home_is_in_a_file(home):
    home.write_text("")
    return home / "below"


def _file_is_a_folder(home):
    (home / f".progress.json.{os.getpid()}.part").mkdir(parents=True)


@pytest.mark.parametrize("spoil", [_home_is_a_file, _home_is_in_a_file, _file_is_a_folder])
def test_where_nothing_can_be_written_the_lab_goes_on(home, spoil, capsys, monkeypatch):
    monkeypatch.setenv("RANKLAB_HOME", str(spoil(home) or home))
    assert check(megabytes_sent=150) is None
    hint("megabytes_sent")
    out = capsys.readouterr().out
    assert "  ok    150 MB" in out and "next: 4.4 ring_all_reduce" in out and "1/3  " in out
    assert out.count("(progress is not kept: ") == 2 and "Set RANKLAB_HOME" in out
    hint("megabytes_sent")  # the count is kept as long as the notebook lives
    assert "2/3  A usual slip" in capsys.readouterr().out
    entry = progress.load()["megabytes_sent"]
    assert (entry["state"], entry["hints"]) == (PASSED, 2)


def run_two(code):
    writers = [subprocess.Popen([sys.executable, "-c", code, name]) for name in ("a", "b")]
    assert [writer.wait(60) for writer in writers] == [0, 0]


def test_two_notebooks_record_at_once(home):
    run_two("import sys; from ranklab.course import progress\n"
            "for i in range(50): progress.record(sys.argv[1], 'failed')\n"
            "for i in range(50): progress.record('both', 'failed')")
    tries = {name: entry["tries"] for name, entry in progress.load().items()}
    assert tries == {"a": 50, "b": 50, "both": 100}
    assert json.loads((home / "progress.json").read_text())


def test_two_terminals_drill_at_once(home):
    run_two("import sys; from ranklab.course import drill\n"
            "marks = drill.Marks(drill.home() / 'drill.json')\n"
            "for i in range(60): marks.add(f'{sys.argv[1]} {i}', 1.0)")
    assert len(Marks(home / "drill.json").history) == 120


def test_records_lie_beside_the_labs_from_anywhere_in_a_checkout(tmp_path, monkeypatch):
    monkeypatch.delenv("RANKLAB_HOME")
    (tmp_path / "labs" / "source").mkdir(parents=True)
    (tmp_path / "solutions" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "solutions" / "deep")
    assert progress.home() == tmp_path / ".ranklab"


def test_on_windows_check_works_and_launch_says_wsl():
    code = """
import signal, sys, sysconfig, torch.distributed
sysconfig.get_config_vars()  # kept, as what follows could not find them
sys.modules["fcntl"] = None  # an import of it fails
del signal.setitimer
sys.platform = "win32"
from ranklab import check, hint, launch
def shard_range(n, rank, size): return range(n)
def all_ranks_finite(loss, group=None): return True
def in_no_lab(): pass  # so that the checks of all labs are loaded
check(shard_range), check(hang_dollars=3), check(in_no_lab), hint("hang_dollars")
check(all_ranks_finite)
launch(print)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    for words in ("is handed out twice", "3 dollars is too small", "no exercise is called", "1/3 ",
                  "  FAIL  launch needs Linux or macOS"):
        assert words in done.stdout, done.stdout + done.stderr
    assert done.stderr.rstrip().endswith("on Windows, run this course inside WSL"), done.stderr


# --- status and what is next ----------------------------------------------------------------------

@pytest.mark.parametrize("stem", labs.written())
def test_every_name_has_its_place_in_the_lab(stem):
    checks, asked = labs.checks_of(stem), outline.outline(stem)
    names = [item.name for item in (*checks.EXERCISES, *checks.PREDICTIONS)]
    assert sorted(one.name for one in asked) == sorted(names) and all(one.section for one in asked)


def test_the_order_is_that_of_the_notebook():
    asked = [str(one) for one in outline.outline("02_collectives")]
    assert asked[:3] == ["1 server_megabytes", "4.1 tree_rounds", "4.1 tree_broadcast"]
    assert "fit_alpha_beta (Further)" in asked and asked.index("4.4 ring_all_reduce") > 3


def test_without_a_source_and_an_index_the_checks_give_the_order(monkeypatch):
    monkeypatch.setattr(index, "entries", dict)
    monkeypatch.setattr(labs, "repository", lambda start=None: None)
    first, second = labs.checks_of("00_ranks").EXERCISES[:2]
    assert outline.next_after(first.name, {}) == f"next: {second.name}"


def test_next_leaves_out_what_is_passed_and_comes_back_to_what_was_skipped(monkeypatch):
    asked = outline.outline("00_ranks")
    passed = {one.name: {"state": PASSED} for one in asked[2:]}
    assert outline.next_after(asked[4].name, passed) == f"next: {asked[0]}"
    passed |= {one.name: {"state": PASSED} for one in asked}
    assert outline.next_after("shard_range", passed) == (
        "all of this lab is passed; next: lab 01_baseline")
    monkeypatch.setattr(labs, "written", lambda: ("00_ranks",))
    assert outline.next_after("shard_range", passed) == "all of this lab is passed"
    assert outline.next_after("in_no_lab", {}) == ""


def test_status_lists_every_lab_in_order_and_says_what_is_next():
    assert status().endswith("you are in 00_ranks; next: 1 hang_dollars")
    for name, state in [("longest_shard", FAILED), ("longest_shard", FAILED),
                        ("tree_broadcast", FAILED), ("tree_rounds", PASSED)]:
        progress.record(name, state)
    hint("tree_rounds")
    lines = status().splitlines()
    total = len(outline.outline("00_ranks"))
    assert lines[0].split() == ["00_ranks", "0", "of", str(total)]
    assert [line for line in lines[:-1] if "tr" in line and line[-1] in "sty"] == [
        "  4.1      longest_shard                failed   2 tries",
        "  4.1      tree_rounds                  passed   1 try, 1 hint",
        "  4.1      tree_broadcast               failed   1 try"]
    assert "  Further  fit_alpha_beta               -" in lines
    assert lines[-1] == "you are in 02_collectives; next: 4.1 tree_broadcast"


@pytest.mark.parametrize("argv", [["02"], ["--lab", "2"], ["collectives"]])
def test_status_of_one_lab(argv, capsys):
    assert cli.main(["status", *argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("02_collectives") and lines[-1].startswith("you are in 02_coll")
    assert len(lines) == len(outline.outline("02_collectives")) + 2


def test_status_of_a_lab_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(labs, "written", lambda: labs.STEMS[:-1])
    assert cli.main(["status", "16"]) == 0
    assert "16_clinic is not written yet" in capsys.readouterr().out


def test_what_is_not_begun_is_folded(capsys):
    written = len(labs.written())
    assert len(status().splitlines()) == written + 3
    progress.record("tree_rounds", FAILED)
    lines = status().splitlines()
    assert len(lines) == written + 3 + len(outline.outline("02_collectives"))
    assert "  4.1      tree_rounds                  failed   1 try" in lines
    assert len(status("all").splitlines()) > 150


def test_a_hint_in_a_terminal(capsys):
    for count in ("1/3", "2/3"):
        assert cli.main(["hint", "tree_rounds"]) == 0
        assert f"{count}  " in capsys.readouterr().out


def test_the_index_says_what_the_labs_and_their_checks_say():
    assert index_builder.is_current(), "run `make build`"
    for stem in labs.written():
        checks = labs.checks_of(stem)
        names = {item.name for item in (*checks.EXERCISES, *checks.PREDICTIONS)}
        assert names == set(labs.names_of(stem)), stem


@pytest.mark.parametrize("command", [
    ["status"], ["status", "02"], ["hint", "ring_all_reduce"], ["hint", "server_megabytes"],
    ["questions", "02"], ["questions", "--level", "5"], ["hint", "ring_al_reduce"],
    ["work", "{here}/work"]])
def test_these_answer_without_torch(command, tmp_path):
    """In a process of its own; torch takes seconds to import."""
    code = ("import sys; from ranklab import cli\n"
            "try: cli.main(sys.argv[1:])\n"
            "except SystemExit as end: print('ended', end.code)\n"
            "print('torch' in sys.modules)")
    words = [word.format(here=tmp_path) for word in command]
    done = subprocess.run([sys.executable, "-c", code, *words], text=True, timeout=100,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, "RANKLAB_HOME": str(tmp_path)})
    assert done.stdout.splitlines()[-1] == "False", done.stdout
    wrong = command[-1] == "ring_al_reduce"
    assert ("ended 2" in done.stdout) == wrong, done.stdout
    assert not wrong or "ring_all_reduce" in done.stdout


def test_a_lab_that_is_being_written_is_looked_up_in_its_checks(monkeypatch):
    whole = labs.names_of("00_ranks"), [str(each) for each in outline.outline("00_ranks")]
    monkeypatch.setattr(index, "entries", dict)
    assert sorted(labs.names_of("00_ranks")) == sorted(whole[0])
    assert [str(each) for each in outline.outline("00_ranks")] == whole[1]


def test_a_wrong_name_in_a_notebook_gets_the_near_ones(capsys):
    hint("ring_al_reduce")
    assert "Did you mean ring_all_reduce" in capsys.readouterr().out


# --- the spine ------------------------------------------------------------------------------------

def test_the_spine_is_what_the_labs_ask():
    """Each part names headings that are there, and each lab's first lines name its part."""
    for part in spine.SPINE:
        asked = part.asked()
        assert {each.section for each in asked} >= set(part.sections), part.stem
        assert f" \xb7 **spine**: {part} \xb7 " in labs.source(part.stem).partition("# %%\n")[0]
    rest = set(labs.written()) - {part.stem for part in spine.SPINE}
    assert not [stem for stem in rest if "**spine**" in labs.source(stem)]


def test_readme_and_paths_have_the_same_spine():
    readme, paths = ((ROOT / name).read_text() for name in ("README.md", "docs/paths.md"))
    rows = re.findall(r"^\| (\w+) \| .* \| (\d+) \|$", paths, re.M)
    assert rows == [(part.stem, str(part.minutes)) for part in spine.SPINE]
    rows = re.findall(r"^\| (\d\d) .* \| (\d):(\d\d) \| ", readme, re.M)
    assert [(stem, 60 * int(h) + int(m)) for stem, h, m in rows] == [
        (part.stem[:2], part.minutes) for part in spine.SPINE]


def test_status_says_how_far_one_is_on_the_spine():
    assert spine.progress({}) == "spine: 0.0 of 9 h; next: 00, 4.1 longest_shard"
    first, second, *_ = spine.SPINE
    records = {each.name: {"state": PASSED} for each in first.asked()}
    assert spine.progress(records) == f"spine: 0.8 of 9 h; next: 02, {second.asked()[0]}"
    records |= {each.name: {"state": PASSED} for part in spine.SPINE for each in part.asked()}
    assert spine.progress(records) == "spine: 8.8 of 9 h: all of it"
    assert "spine: 0.0 of 9 h" in status() and "spine" not in status("02")
