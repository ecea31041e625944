"""`make gpu` without a GPU: each part runs in rehearsal; one that breaks takes no other with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "scripts" / "gpu"
sys.path.insert(0, str(FOLDER))

import parts  # noqa: E402
import report  # noqa: E402

sys.path.remove(str(FOLDER))


def gpu(*arguments, timeout=100, **variables):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RANKLAB_")}
    return subprocess.run([sys.executable, FOLDER, *map(str, arguments)], text=True, cwd="/",
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout,
                          stdin=subprocess.DEVNULL, env={**environ, **variables})


def read(folder):
    whole = json.loads((folder / "report.json").read_text())
    return whole["about"], {part["name"]: part for part in whole["parts"]}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_parts_run_in_rehearsal(tmp_path):
    """What every GPU machine runs first; the others are in the sweep."""
    done = gpu("--out", tmp_path, "--parts", "machine", "all_reduce", "data", "zero", timeout=280)
    about, found = read(tmp_path)
    assert done.returncode == 0, done.stdout
    assert about["rehearsal"] and about["ranks"] == 2 and not about["share"]
    assert {part["state"] for part in found.values()} == {"passed"}
    assert float(found["zero"]["numbers"]["ZeRO-3"]) < 1e-6
    assert "gpu:gloo" in found["machine"]["numbers"]["backend"]
    text = (tmp_path / "report.md").read_text()
    assert "4 passed, 0 failed, 0 left out" in text and "a rehearsal: no GPU" in text


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_all_parts_run_in_rehearsal(tmp_path):
    done = gpu("--out", tmp_path, "--minutes", 14, timeout=880)
    about, found = read(tmp_path)
    assert done.returncode == 0 and list(found) == list(parts.PARTS), done.stdout
    assert {part["state"] for part in found.values()} <= {"passed", "left out"}


BROKEN = """
import os, time, parts
part = parts.PARTS["machine"]
def add(name, seconds=60):
    parts.PARTS[name] = part._replace(function=f"broken.{name}", seconds=seconds)
def wrong(job): assert False, "loss 1.0, by one process 2.0"
def raises(job): raise ValueError("of the part")
def dies(job): os.abort()
def hangs(job): time.sleep(600)
def lacks(job): raise parts.LeftOut("nbval is not installed")
def fine(job): return {"ranks": job["ranks"]}
for name in ("wrong", "raises", "dies", "lacks", "fine"): add(name)
add("hangs", 12)
"""


def test_a_broken_part_is_reported_and_the_others_run(tmp_path, monkeypatch):
    """The parts are broken on purpose, each in its own way."""
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import broken\n")
    names = "wrong", "raises", "dies", "hangs", "lacks", "fine"
    done = gpu("--out", tmp_path / "out", "--ranks", 3, "--parts", *names, PYTHONPATH=str(tmp_path))
    _, found = read(tmp_path / "out")
    assert done.returncode == 1, done.stdout
    assert [found[name]["state"] for name in names] == ["failed"] * 4 + ["left out", "passed"]
    assert found["wrong"]["words"] == "loss 1.0, by one process 2.0"
    assert "ValueError: of the part" in found["raises"]["words"]
    assert found["dies"]["words"].startswith("exit code -6")
    assert found["hangs"]["words"].startswith("not done after")
    assert found["lacks"]["words"] == "nbval is not installed"
    assert found["fine"]["numbers"] == {"ranks": 3}
    text = (tmp_path / "out" / "report.md").read_text()
    assert "1 passed, 4 failed, 1 left out" in text and "### raises failed" in text


def test_without_time_the_rest_is_left_out(tmp_path):
    done = gpu("--out", tmp_path, "--minutes", 0.1)
    _, found = read(tmp_path)
    assert done.returncode == 0 and len(found) == len(parts.PARTS)
    assert {(part["state"], part["words"]) for part in found.values()} == {
        ("left out", "no time was left")}


def test_what_would_run_and_what_is_not_known():
    listed = gpu("--list").stdout
    assert [line.split()[2] for line in listed.splitlines()] == list(parts.PARTS)
    assert "no part is called zero4; there are machine," in gpu("--parts", "zero4").stdout


@pytest.mark.parametrize("name", parts.PARTS)
def test_each_part_has_its_function(name, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    assert callable(parts.PARTS[name].load())


def test_words_of_a_table_stay_in_their_cell():
    result = {"name": "a", "what": "w", "state": "failed", "seconds": 1.0, "numbers": {},
              "words": "x | y\nmore"}
    assert report.cell(result) == "x / y"
    assert report.line(result) == "failed       1.0 s  a            x | y"


def test_gradients_that_are_twice_too_large_are_refused(monkeypatch):
    """AdamW and the clipping hide them in the losses, so that the norms must tell."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import equal

    class Twice(equal.DataParallel):
        def backward(self, loss):
            super().backward(2 * loss)

    with pytest.raises(AssertionError, match="twice: losses and norms"):
        equal.agree({"ranks": 2, "rehearsal": True}, {"twice": equal.Way(Twice)})
