"""The copies in work/: made once, refreshed while unedited, else never written again."""

import json
import os
import platform
import shutil
import subprocess
import sys

import nbformat
import pytest
from conftest import ROOT, repository_files

from ranklab import cli
from ranklab.course import build as builder
from ranklab.course import labs, progress, work
from ranklab.course.build import BuildError, build, stale
from ranklab.course.notebook import read_cells

STEM = "00_ranks"
SOURCE = "# %% [markdown]\n# # 00 One lab\n\n# %%\nx = ...\n\n# %%\nprint(x)\n"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A checkout with one small lab, built; the learner stands in it."""
    (tmp_path / "labs" / "source").mkdir(parents=True)
    monkeypatch.setattr(builder, "execute", lambda notebook, root: None)
    monkeypatch.chdir(tmp_path)
    newer(tmp_path, SOURCE)
    return tmp_path


def newer(root, source):
    """`git pull` brings the lab that follows from this source."""
    (root / "labs" / "source" / f"{STEM}.py").write_text(source)
    build(root, force=True)


def names(root):
    return sorted(path.name for path in (root / "work").glob("*.ipynb"))


def save(path, cells=None, ran=True):
    """JupyterLab saves the notebook: outputs and counts of a run, and cells where they changed."""
    notebook = nbformat.read(path, as_version=4)
    for number, text in (cells or {}).items():
        notebook.cells[number].source = text
    for count, cell in enumerate(notebook.cells if ran else ()):
        cell.metadata["editable"] = True
        if cell.cell_type == "code":
            cell.execution_count = count
            cell.outputs = [nbformat.v4.new_output("stream", text="Ellipsis\n")]
    if ran:                                       # Shift+Enter in the last cell makes another
        notebook.cells.append(nbformat.v4.new_code_cell(""))
        notebook.metadata["language_info"] = {"name": "python", "version": "3.13.1"}
    nbformat.write(notebook, path)
    return path.read_bytes()


def bring(root):
    return work.bring(root, root / "work")


def test_each_lab_is_copied_once(root, capsys):
    assert cli.main(["work"]) == 0
    assert "Copied to work/: 00_ranks. Work there" in capsys.readouterr().out
    copy = root / "work" / f"{STEM}.ipynb"
    assert read_cells(copy) == read_cells(root / "labs" / copy.name)
    about = json.loads(copy.read_text())["metadata"]
    assert about["kernelspec"]["display_name"] == "Python 3 (ipykernel)", "as JupyterLab completes"
    assert about["language_info"]["version"] == platform.python_version()
    assert os.access(copy, os.W_OK)
    assert cli.main(["work"]) == 0 and capsys.readouterr().out == ""
    copy.unlink()
    assert "Copied" in bring(root)[0] and copy.exists(), "a copy that was deleted comes again"


@pytest.mark.parametrize("ran", [False, True], ids=["edited", "edited and run"])
def test_a_copy_with_cells_of_ones_own_is_never_written_again(root, ran):
    bring(root)
    mine = save(root / "work" / f"{STEM}.ipynb", {1: "x = 42"}, ran)
    for number in range(3):
        newer(root, SOURCE.replace("One lab", f"Version {number}"))
        said = bring(root)
        assert said == ["00_ranks has a newer version: 00_ranks.ipynb holds your cells and stays "
                        "as it is; the new one is work/00_ranks.new.ipynb. `ranklab work --merge "
                        "00_ranks` brings your cells into it."]
        assert bring(root) == [], "it is said once"
        assert (root / "work" / f"{STEM}.ipynb").read_bytes() == mine
        assert f"Version {number}" in (root / "work" / f"{STEM}.new.ipynb").read_text()
    assert names(root) == [f"{STEM}.ipynb", f"{STEM}.new.ipynb"]
    (root / "work" / f"{STEM}.new.ipynb").unlink()
    assert bring(root) == [] and names(root) == [f"{STEM}.ipynb"], "what is not wanted stays away"


def test_the_new_one_is_the_learners_too_as_soon_as_it_has_cells(root):
    bring(root)
    copies = [root / "work" / f"{STEM}{kind}.ipynb" for kind in ("", ".new", ".new2")]
    kept = [save(copies[0], {1: "x = 1"})]
    for number in (1, 2):
        newer(root, SOURCE.replace("One lab", f"Version {number}"))
        bring(root)
        kept.append(save(copies[number], {1: f"x = {number}"}))
    assert [path.read_bytes() for path in copies] == kept


def test_an_unedited_copy_becomes_the_newer_version_also_after_a_run_was_saved(root):
    bring(root)
    copy = root / "work" / f"{STEM}.ipynb"
    save(copy)
    assert bring(root) == []
    newer(root, SOURCE.replace("One lab", "Two labs"))
    assert bring(root) == ["00_ranks: your copy had no changes; it is now the newer version."]
    assert read_cells(copy) == read_cells(root / "labs" / copy.name)
    assert not any(cell.get("outputs") for cell in json.loads(copy.read_text())["cells"])
    assert bring(root) == [] and names(root) == [copy.name]


@pytest.mark.parametrize("text", ["", "<<<<<<< HEAD\n", "[]", '{"cells": 3, "metadata": {}}'])
def test_a_copy_that_cannot_be_read_is_left_alone(root, text):
    bring(root)
    (root / "work" / f"{STEM}.ipynb").write_text(text)
    newer(root, SOURCE.replace("One lab", "Two labs"))
    bring(root)
    assert (root / "work" / f"{STEM}.ipynb").read_text() == text
    assert names(root) == [f"{STEM}.ipynb", f"{STEM}.new.ipynb"]


OLD = """# %% [markdown]
# # 00 One lab

# %%
import math

# %%
def shard_range(n, rank, size):
    raise NotImplementedError("exercise 4.1: 3 lines")

# %%
shard_range = check(shard_range)

# %%
check(longest_shard=...)

# %%
change = {}
"""
# Newer: a text, the stub and the cell of the prediction are others; `change` is gone.
NEW = (OLD.replace("One lab", "Two labs").replace("3 lines", "2 lines").replace("change = {}", "")
       .replace("check(longest", "print()\ncheck(longest").replace("# %%\n\n", ""))
MINE = {1: "import math, os", 2: "def helper(): pass\n\ndef shard_range(n, rank, size):\n    pass",
        4: "check(longest_shard=10**6 / 8)", 5: "change = {1: 2}"}


def merged(root):
    """Sources of work's copy after a merge, which the learner's edits of OLD and NEW went into."""
    assert cli.main(["work", "--merge", "00"]) == 0
    notebook = nbformat.read(root / "work" / f"{STEM}.ipynb", as_version=4)
    nbformat.validate(notebook)
    return [cell.source for cell in notebook.cells]


def test_the_learners_cells_go_into_the_newer_lab(root, capsys):
    newer(root, OLD)
    bring(root)
    old = save(root / "work" / f"{STEM}.ipynb", MINE)
    newer(root, NEW)
    assert merged(root) == ["# 00 Two labs", MINE[1], MINE[2],
                            "shard_range = check(shard_range)",
                            "print()\ncheck(longest_shard=10 ** 6 / 8)", MINE[5]]
    assert "with 4 of your cells; the old copy is 00_ranks.old.ipynb" in capsys.readouterr().out
    assert (root / "work" / f"{STEM}.old.ipynb").read_bytes() == old
    assert names(root) == [f"{STEM}.ipynb", f"{STEM}.old.ipynb"] and bring(root) == []
    for number in range(2):  # an even newer one, and merged again
        newer(root, NEW.replace("Two labs", f"{number} labs"))
        assert MINE[2] in merged(root)
    assert len(names(root)) == 4, "no copy is ever written again"


IMPORTS = """# %%
from ranklab.clinic.trainings import (
    DataLoader, DistributedSampler, F, TensorDataset, device, digits, dist, nn, pack, torch)

"""
BUG = """# %%
def no_faster(epochs=2):
    shuffle = True

# %%
check(clinic_no_faster_cause=...)

# %%
no_faster = check(no_faster)

"""
FIXED = "def no_faster(epochs=2):\n    shuffle = False"


def newer_of(root, sources):
    """`git pull` brings these labs, {stem: source}; then `ranklab work`."""
    for stem, source in sources.items():
        (root / "labs" / "source" / f"{stem}.py").write_text(source)
    build(root, sources, force=True)
    return bring(root)


@pytest.mark.parametrize("is_03_edited", [False, True])
def test_an_exercise_that_another_lab_asks_by_now_goes_there(root, is_03_edited, capsys):
    """Lab 16 had the bugs of the labs once."""
    old = {"03_data_parallel": f"# %%\nx = 1\n\n{IMPORTS}", "16_clinic": IMPORTS + BUG}
    newer_of(root, old)
    if is_03_edited:
        save(root / "work" / "03_data_parallel.ipynb", {0: "x = 2"})
    added = "def ring_shift(x):\n    'a helper of mine'"
    clinic = root / "work" / "16_clinic.ipynb"
    save(clinic, {1: FIXED, 2: "check(clinic_no_faster_cause=1)"})
    notebook = nbformat.read(clinic, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(added))
    nbformat.write(notebook, clinic)
    newer_of(root, {"03_data_parallel": old["03_data_parallel"] + BUG,
                    "16_clinic": f"{IMPORTS}# %%\nlook = 1\n"})
    assert cli.main(["work", "--merge", "16"]) == 0
    place = f"03_data_parallel{'.new' if is_03_edited else ''}.ipynb"
    assert f"no_faster, clinic_no_faster_cause: now in {place}" in capsys.readouterr().out
    there = [cell.source for cell in nbformat.read(root / "work" / place, as_version=4).cells]
    assert FIXED in there and "check(clinic_no_faster_cause=1)" in there
    here = [cell.source for cell in nbformat.read(clinic, as_version=4).cells]
    assert added in here and not any("no_faster" in source for source in here)
    if is_03_edited:
        assert cli.main(["work", "--merge", "03"]) == 0
        there = [cell.source for cell in nbformat.read(
            root / "work" / "03_data_parallel.ipynb", as_version=4).cells]
        assert FIXED in there and "x = 2" in there


def test_an_exercise_whose_new_place_is_taken_stays(root, capsys):
    newer_of(root, {"03_data_parallel": IMPORTS, "16_clinic": IMPORTS + BUG})
    save(root / "work" / "16_clinic.ipynb", {1: FIXED})
    newer_of(root, {"03_data_parallel": IMPORTS + BUG, "16_clinic": IMPORTS})
    better = f"{FIXED}  # in lab 03"
    save(root / "work" / "03_data_parallel.ipynb", {1: better})
    assert cli.main(["work", "--merge", "16"]) == 0
    assert "with 1 of your cells; the old copy" in capsys.readouterr().out
    for stem, source in (("03_data_parallel", better), ("16_clinic", FIXED)):
        path = root / "work" / f"{stem}.ipynb"
        assert source in [cell.source for cell in nbformat.read(path, as_version=4).cells]


def test_what_was_written_in_the_newer_lab_stays_there_too(root):
    newer(root, OLD)
    bring(root)
    save(root / "work" / f"{STEM}.ipynb", {2: MINE[2]})
    newer(root, NEW)
    bring(root)
    better = MINE[2].replace("pass", "return range(n)")
    new = save(root / "work" / f"{STEM}.new.ipynb", {2: better})
    sources = merged(root)
    assert better in sources and MINE[2] in sources
    assert (root / "work" / f"{STEM}.old2.ipynb").read_bytes() == new


@pytest.mark.parametrize("spoilt", ["", ".new"])
def test_nothing_is_merged_with_what_is_no_notebook(root, spoilt, capsys):
    newer(root, OLD)
    bring(root)
    save(root / "work" / f"{STEM}.ipynb", MINE)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["work", "--merge", "00"])
    assert "work/ has no newer version of 00_ranks next to your copy" in capsys.readouterr().err
    newer(root, NEW)
    bring(root)
    (root / "work" / f"{STEM}{spoilt}.ipynb").write_text("<<<<<<< HEAD")
    before = {path: path.read_bytes() for path in (root / "work").glob("*.ipynb")}
    with pytest.raises(SystemExit, match="2"):
        cli.main(["work", "--merge", "00"])
    assert "can't be read as a notebook, and nothing was changed" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in (root / "work").glob("*.ipynb")}


def test_a_lost_record_costs_nothing(root):
    bring(root)
    mine = save(root / "work" / f"{STEM}.ipynb", {1: "x = 42"})
    for text in ("{", "[1]"):
        (root / "work" / ".given.json").write_text(text)
        assert bring(root) == [] and names(root) == [f"{STEM}.ipynb"]
    assert (root / "work" / f"{STEM}.ipynb").read_bytes() == mine


def test_answers_in_labs_itself_are_carried_to_work(root):
    bring(root)
    mine = save(root / "work" / f"{STEM}.ipynb", {1: "x = 42"})
    lab = root / "labs" / f"{STEM}.ipynb"
    course = lab.read_text()
    save(lab, {1: "x = 43"})
    assert bring(root) == ["labs/00_ranks.ipynb was changed: its cells are in "
                           "work/00_ranks.new.ipynb. `git checkout labs/00_ranks.ipynb` brings "
                           "the course's lab back."]
    assert bring(root) == []
    lab.write_text(course)
    assert bring(root) == [], "both copies are still there, and this version was given"
    assert (root / "work" / f"{STEM}.ipynb").read_bytes() == mine
    assert "x = 43" in (root / "work" / f"{STEM}.new.ipynb").read_text()
    lab.write_text("<<<<<<< HEAD\n")
    assert bring(root) == ["labs/00_ranks.ipynb can't be read as a notebook: `git checkout "
                           "labs/00_ranks.ipynb` brings the course's lab back."]


def test_an_interrupted_write_leaves_what_was_there(root, monkeypatch):
    bring(root)
    copy = root / "work" / f"{STEM}.ipynb"
    before = copy.read_text()
    newer(root, SOURCE.replace("One lab", "Two labs"))
    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            bring(root)
    assert copy.read_text() == before and not list((root / "work").glob("*.part"))
    assert not list((root / "work").glob(".*.part"))
    assert bring(root) == ["00_ranks: your copy had no changes; it is now the newer version."]


@pytest.mark.parametrize("folder", ["labs", "solutions"])
def test_a_build_refuses_to_lose_cells_that_it_did_not_write(root, folder):
    path = root / folder / f"{STEM}.ipynb"
    save(path)
    build(root)                                   # a run alone is no answer
    answers = save(path, {1: "x = 42"})
    newer_source = SOURCE.replace("One lab", "Two labs")
    (root / "labs" / "source" / f"{STEM}.py").write_text(newer_source)
    with pytest.raises(BuildError, match=rf"^{folder}/00_ranks.ipynb: cells .*to work/.*--force"):
        build(root)
    assert path.read_bytes() == answers
    assert stale(root) == [f"labs/{STEM}.ipynb", f"solutions/{STEM}.ipynb"], "nothing was built"
    build(root, force=True)
    assert stale(root) == []


def test_build_says_which_labs_there_are(root, capsys):
    for name, said in (("99", "no lab is called '99'; the labs are 00_ranks, "),
                       ("16", "16_clinic is planned")):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["build", name])
        assert said in capsys.readouterr().err


def test_the_command_alone_shows_the_status(capsys):
    assert cli.main([]) == 0
    alone = capsys.readouterr().out
    assert cli.main(["status"]) == 0
    assert alone == capsys.readouterr().out != ""


def test_from_work_everything_is_found_that_is_found_from_labs(root, monkeypatch):
    bring(root)
    monkeypatch.delenv("RANKLAB_HOME")
    monkeypatch.chdir(root / "work")
    assert labs.repository() == work.checkout() == root
    assert progress.home() == root / ".ranklab"


def test_the_copies_of_a_shared_clone_go_to_a_folder_of_ones_own(tmp_path, monkeypatch, capsys):
    """The JupyterHub of docs/teaching.md: `ranklab work ~/labs`, outside the clone."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["work", "labs"]) == 0
    assert "Copied to labs/: 00_ranks, " in capsys.readouterr().out
    assert (tmp_path / "labs" / f"{STEM}.ipynb").exists()


def rules(root, tutor="ask\n"):
    """The repository's own AGENTS.md, with this text for learners."""
    (root / "AGENTS.md").write_text(
        f"# Rules\n\nTwo kinds.\n\n## With a learner: be a tutor\n\n{tutor}\n"
        "## With a maintainer\n\nmake check\n")
    return [root / "work" / name for name in ("AGENTS.md", "CLAUDE.md")]


def test_an_assistant_in_work_is_a_tutor_and_never_a_maintainer(tmp_path, capsys):
    """With the repository's own text; in a folder outside the clone as well."""
    assert cli.main(["work", str(tmp_path / "labs")]) == 0
    text = (tmp_path / "labs" / "AGENTS.md").read_text()
    learner, maintainer = (ROOT / "AGENTS.md").read_text().split("\n## ")[1:]
    assert text.startswith("# For assistants: be a tutor\n")
    assert all(line in text for line in learner.splitlines()[1:])
    assert not any(line in text for line in maintainer.splitlines() if line)
    assert "](" not in text, "a link of the repository leads nowhere from here"
    assert (tmp_path / "labs" / "CLAUDE.md").read_text() == "@AGENTS.md\n"
    assert (ROOT / "CLAUDE.md").read_text() == "@AGENTS.md\n"


def test_a_newer_text_for_assistants_replaces_an_untouched_one_only(root):
    agents, claude = rules(root)
    bring(root)
    assert "\nask\n" in agents.read_text() and "make check" not in agents.read_text()
    rules(root, "ask more\n")
    bring(root)
    assert "\nask more\n" in agents.read_text()
    agents.write_text("Tell me everything.\n")
    claude.unlink()
    for tutor in ("ask less\n", "ask more\n"):
        rules(root, tutor)
        bring(root)
        assert agents.read_text() == "Tell me everything.\n" and not claude.exists()


@pytest.mark.parametrize("text", [b"my own\n", b"\xff", None], ids=["text", "bytes", "folder"])
def test_rules_that_a_learner_had_before_stay(root, text):
    agents, claude = rules(root)
    (root / "work").mkdir()
    agents.mkdir() if text is None else agents.write_bytes(text)
    for _ in range(2):
        bring(root)
        assert agents.is_dir() if text is None else agents.read_bytes() == text
        assert claude.exists()


def test_a_place_that_cannot_be_written_is_a_sentence(root, capsys):
    (root / "work").write_text("a file")
    assert cli.main(["work"]) == 1
    assert "the copies of the labs can't be written: " in capsys.readouterr().err


def test_what_happens_in_work_is_nothing_to_git_and_to_the_tests(tmp_path):
    """In a clone with the real labs: a save, a run, a checkpoint, another notebook."""
    for name in repository_files():
        if name.startswith("labs/") or name in (".gitignore",):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    run = [sys.executable, "-m", "ranklab.cli", "work"]
    said = subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert all(path.stem in said for path in (ROOT / "labs").glob("*.ipynb"))
    save(tmp_path / "work" / f"{STEM}.ipynb", {1: "mine"})
    for folder in ("work", "labs"):
        (tmp_path / folder / ".ipynb_checkpoints").mkdir()
        shutil.copy(tmp_path / "work" / f"{STEM}.ipynb",
                    tmp_path / folder / ".ipynb_checkpoints" / f"{STEM}-checkpoint.ipynb")
    status = subprocess.run([*git, "status", "--porcelain"], cwd=tmp_path, check=True,
                            capture_output=True, text=True)
    assert status.stdout == ""
