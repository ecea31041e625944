"""Every lab has the same form; only the tour in labs/ has outputs; nbval itself is seen failing."""

import inspect
import re
import subprocess
import sys

import jupytext
import nbformat
import pytest
from conftest import ROOT

from ranklab.course import build as builder, labs
from ranklab.engine.surroundings import patience
from ranklab.ranks import shard_range

SOURCES = sorted((ROOT / "labs" / "source").glob("[0-9]*.py"))
TOUR = ROOT / "labs" / f"{labs.TOUR}.ipynb"
TOUR_SOURCE = ROOT / "labs" / "source" / f"{labs.TOUR}.py"
NOTEBOOKS = sorted([*(ROOT / "labs").glob("*.ipynb"), *(ROOT / "solutions").glob("*.ipynb")])
SECTIONS = ["1. Story", "2. Picture", "3. Smallest working code", "4. Build it",
            "5. The real thing", "6. Project", "7. Measure"]
BUG = "Bug of the lab"  # in some labs, after these
LAST = ["Interview questions", "On real GPUs", "Take with you"]
BOX = re.compile(r"^> difficulty \d/5 \W importance \d/5 \W \d+ minutes \W about \d+ lines?", re.M)
SOLUTION_BYTES = 400_000


def named(path):
    return str(path.relative_to(ROOT))


def cells_of(source):
    return jupytext.read(source, fmt="py:percent").cells


def headings(source):
    """[(level, text), ...] of a lab."""
    text = "\n".join(cell.source for cell in cells_of(source) if cell.cell_type == "markdown")
    return [(len(marks), title.strip()) for marks, title in re.findall(r"^(#+) (.+)$", text, re.M)]


# --- form -------------------------------------------------------------------------------------

@pytest.mark.parametrize("source", SOURCES, ids=named)
def test_headings_in_order(source):
    found = headings(source)
    titles = [text for level, text in found if level == 1]
    assert len(titles) == 1 and titles[0].startswith(source.stem[:2] + " ")
    bug = [BUG] if (2, f"8. {BUG}") in found else []
    rest = [f"{number}. {text}" for number, text in enumerate([*bug, *LAST], 8)]
    assert [text for level, text in found if level == 2] == SECTIONS + rest
    numbers = [text.split()[0] for level, text in found if level == 3 and text.startswith("4.")]
    assert numbers == [f"4.{i + 1}" for i in range(len(numbers))] and len(numbers) >= 3


@pytest.mark.parametrize("source", [*SOURCES, TOUR_SOURCE], ids=named)
def test_code_in_labs_fits_and_is_ascii(source):
    for cell in cells_of(source):
        for line in cell.source.splitlines() if cell.cell_type == "code" else ():
            assert len(line) <= 100 and line.isascii(), line


@pytest.mark.parametrize("source", SOURCES, ids=named)
def test_every_exercise_has_a_stub_a_check_and_a_box(source):
    cells = cells_of(source)
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    names = [exercise.name for exercise in labs.checks_of(source.stem).EXERCISES]
    for name in names:
        assert re.search(rf"^(def|class) {name}\b", code, re.M), f"no stub of {name}"
        assert re.search(rf"^{name} = check\({name}\)", code, re.M), f"{name} is not checked"
    assert len(BOX.findall(text)) >= len(names), "an exercise without its box"
    for prediction in labs.checks_of(source.stem).PREDICTIONS:
        assert f"{prediction.name}=..." in code, f"{prediction.name} is not asked"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_notebook_files(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    ids = [cell.id for cell in notebook.cells]
    assert len(ids) == len(set(ids))
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    if path.parent.name == "labs" and path != TOUR:
        assert not [cell for cell in code if cell.outputs or cell.execution_count]
        return
    assert path.stat().st_size <= SOLUTION_BYTES
    assert all(cell.execution_count for cell in code), "a cell was not executed"
    bad = [cell.source for cell in code for output in cell.outputs if output.output_type == "error"]
    assert not bad


@pytest.mark.parametrize("source", SOURCES, ids=named)
def test_no_verdict_is_compared(source):
    """A verdict's look is the page's business: it changes, and the checks' tests hold its words."""
    compared = [cell.source for cell in cells_of(source)
                if builder.COMPARED in cell.metadata.get("tags", ())]
    assert len(compared) >= 5, "five tables of a lab can't rot"
    assert not [text for text in compared if re.search(r"\bcheck\(", text)]


@pytest.mark.parametrize("path", [TOUR, *sorted((ROOT / "solutions").glob("*.ipynb"))],
                         ids=named)
def test_what_is_compared_is_not_the_rounding_of_one_machine(path):
    """The sixth digit of a sum is another on another processor, and on a GPU."""
    compared = [output.get("text", "") for cell in nbformat.read(path, as_version=4).cells
                if builder.COMPARED in cell.metadata.get("tags", ()) for output in cell.outputs]
    numbers = re.findall(r"\d+\.\d+", " ".join(compared))
    assert not [each for each in numbers if len(each.replace(".", "").lstrip("0")) > 5]


# --- the harness: what must fail does -----------------------------------------------------------

RIGHT = "from ranklab import check\n" + inspect.getsource(shard_range) + "check(shard_range)"
HARNESS = {  # a cell: whether it passes
    "import torch\nimport torch.distributed as dist\nfrom ranklab import launch": True,
    "launch(lambda: dist.get_rank(), ranks=2)": True,
    "def work():\n    assert dist.get_rank() == 0, 'rank 1 came'\nlaunch(work, ranks=2)": False,
    "assert launch(dist.get_rank, ranks=2) == [0, 1]": True,
    "launch(dist.recv, torch.ones(1), ranks=2, timeout=1)": False,
    "1 + 1": True,
    RIGHT: True,
    RIGHT.replace("return range(", "return range(1 + "): False,
    "import time\ntime.sleep(1000)": False,
}
BUILT = "shard_range\n  ->    passed\n"  # what both cells with a check said when they were built
CELL_LIMIT = 15  # seconds, on an idle machine


@pytest.mark.slow
def test_nbval_fails_a_cell_that_raises_hangs_never_ends_or_fails_its_check(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in HARNESS])
    for number, cell in enumerate(notebook.cells):
        if "shard_range" in cell.source:
            output = nbformat.v4.new_output("stream", text=BUILT)
            cell.update(execution_count=number + 1, outputs=[output])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, tmp_path / "made.ipynb")
    busy = patience()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "rules",
         "--durations=0", "--nbval-lax", f"--nbval-cell-timeout={CELL_LIMIT * busy:.0f}",
         tmp_path / "made.ipynb"], cwd=ROOT / "tests", timeout=110, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    verdicts = re.findall(r"Cell \d+ (PASSED|FAILED)", done.stdout)
    assert verdicts == ["PASSED" if good else "FAILED" for good in HARNESS.values()], done.stdout
    assert "rank 1 came" in done.stdout and "0 checks pass, not 1" in done.stdout, done.stdout
    assert "ranks 0, 1 of 2 did not finish within 1 s" in done.stdout, "not the cell's limit"
    took, = re.findall(r"([\d.]+)s call .*Cell 4$", done.stdout, re.M)
    assert float(took) < 1 + 5 * busy, "the cell was held"


def test_a_skip_that_nobody_allowed_fails(tmp_path):
    (tmp_path / "test_made.py").write_text(
        "import pytest\n\ndef test_a():\n    pytest.skip('some reason')\n\n"
        "def test_b():\n    pytest.skip('needs CUDA')\n")
    done = subprocess.run([sys.executable, "-m", "pytest", "-rs", "-p", "rules", tmp_path],
                          cwd=ROOT / "tests", capture_output=True, text=True, timeout=60)
    assert "1 failed, 1 skipped" in done.stdout and "ALLOWED_SKIPS" in done.stdout, done.stdout
