"""`ranklab rehearse`: a notebook, a script or a module runs on the CPU, under a GPU's rules.

What the rules are, and what can't be rehearsed: ranklab.engine.rehearse.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ranklab.course.notebook import plain, read_cells, run_cells
from ranklab.course.program import words_of

CELL_LIMIT = 300  # seconds; longer than the engine's, whose report of a hang says more


def rehearse(program, arguments=()):
    """Run `program`, a .ipynb or .py file, or a module; print what a GPU would refuse.

    Returns: 0 when nothing raised, 1 when something did, or when no rank was launched
    Raises: ValueError if there is no such file or module, or the file is no notebook
    """
    if not program.endswith(".ipynb"):
        return _rehearse_program(words_of(program, "and no .py or .ipynb file"), arguments)
    path = Path(program)
    if not path.is_file():
        raise ValueError(f"there is no file {program}")
    if read_cells(path).now is None:
        raise ValueError(f"{program} can't be read as a notebook")
    cells, errors = run(path)
    for number, source, error in errors:
        print(f"{path.name}, cell {number}, which begins with: {source.splitlines()[0]}\n{error}\n")
    print(f"{path.name}: {len(errors)} of {cells} cells with code raised under a GPU's rules")
    return int(bool(errors))


def _rehearse_program(words, arguments):
    with tempfile.TemporaryDirectory(prefix="ranklab-") as folder:
        mark = Path(folder, "rehearsed")
        environ = os.environ | {"RANKLAB_REHEARSE": "gpu", "RANKLAB_REHEARSED": str(mark)}
        failed = subprocess.call([sys.executable, *words, *arguments], env=environ) != 0
        if mark.exists():
            return int(failed)
    print(f"{words[-1]} {'failed' if failed else 'ended'}, but it launched no ranks: nothing was "
          "held to a GPU's rules.\nA rehearsal is for ranks of ranklab's launch; a script that "
          "calls init_process_group has none.")
    return 1


def run(path, shorter=()):
    """Run the notebook's cells in its own folder, under a GPU's rules.

    The notebook and your progress stay as they are.
    shorter: {text of a cell: its replacement}, which does less work of the same kind
    Returns: how many cells ran, and [(number, source, error)] of the cells that raised
    Raises: ValueError if no cell has such a text
    """
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    for text in shorter:
        matches = [cell for cell in notebook.cells if text in cell.source]
        if not matches:
            raise ValueError(f"{path.name}: no cell has {text!r}")
        for cell in matches:
            cell.source = cell.source.replace(text, shorter[text])
    run_cells(notebook, path.parent, CELL_LIMIT, {"RANKLAB_REHEARSE": "gpu"}, allow_errors=True)
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    errors = [(number, cell.source, plain("\n".join(output.traceback)).strip())
              for number, cell in enumerate(code, 1) for output in cell.outputs
              if output.output_type == "error"
              and "raises-exception" not in cell.metadata.get("tags", [])]
    return len(code), errors
