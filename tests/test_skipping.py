"""An unsolved lab runs whatever is skipped, and from its middle after a restart."""

import copy

import nbformat
import pytest
from conftest import ROOT
from test_rehearse_labs import SHORTER

from ranklab.course import build, labs
from ranklab.course.cells import headings
from ranklab.course.notebook import run_cells

# `make test` has each way once, and `make sweep` has all ways for all labs.
WAYS = ("odd", "even", "middle")
USUAL = {"03_data_parallel": "even", "09_pipeline_parallel": "odd", "15_cluster": "middle"}


def cases():
    for stem in labs.written():
        for way in WAYS:
            marks = [pytest.mark.slow] if USUAL.get(stem) == way else [pytest.mark.sweep]
            yield pytest.param(stem, way, id=f"{stem}-{way}", marks=marks)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stem, way", list(cases()))
def test_the_rest_runs(stem, way, tmp_path):
    whole = build.lab_notebook(ROOT, stem)
    for cell in whole.cells:
        for text, instead in SHORTER.get(stem, {}).items():
            cell.source = cell.source.replace(text, instead)
    nbformat.write(whole, tmp_path / "lab.ipynb")
    rest = without_middle(whole) if way == "middle" else without(whole, WAYS.index(way))
    run_cells(rest, ROOT / "solutions", build.CELL_LIMIT, {
        "JPY_SESSION_NAME": str(tmp_path / "lab.ipynb"), "RANKLAB_ANSWERS": "1",
        "MPLBACKEND": "agg"})


def stubs(notebook):
    """The numbers of the cells that define an exercise."""
    names = {each.name for each in labs.checks_of(notebook.metadata.ranklab["stem"]).EXERCISES}
    return [number for number, cell in enumerate(notebook.cells) if cell.cell_type == "code"
            and names & build.bound_names(cell.source) and "check(" not in cell.source]


def without(notebook, first):
    """The notebook without the code under the headings of every second exercise, from `first`."""
    left_out = set()
    for stub in stubs(notebook)[first::2]:
        left_out |= set(section(notebook, stub))
    return of_cells(notebook, [number for number in range(len(notebook.cells))
                               if number not in left_out])


def without_middle(notebook):
    """The first cell of code, catch_up(), and the second half from an exercise's heading on."""
    numbers = stubs(notebook)
    stub = numbers[len(numbers) // 2]
    first = next(n for n, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    name = next(name for name in build.bound_names(notebook.cells[stub].source)
                if labs.find_exercise(name))
    rest = of_cells(notebook, [first, *range(section(notebook, stub).start, len(notebook.cells))])
    rest.cells.insert(1, nbformat.v4.new_code_cell(f'catch_up("{name}")'))
    return rest


def section(notebook, number):
    """From the heading above the cell `number` to the next of the same or a higher level."""
    levels = [min((level for level, _ in headings(cell.source)), default=9)
              if cell.cell_type == "markdown" else 9 for cell in notebook.cells]
    start = next(n for n in range(number, -1, -1) if levels[n] < 9)
    end = next((n for n in range(start + 1, len(levels)) if levels[n] <= levels[start]),
               len(levels))
    return range(start, end)


def of_cells(notebook, numbers):
    rest = copy.deepcopy(notebook)
    rest.cells = [rest.cells[number] for number in numbers]
    return rest
