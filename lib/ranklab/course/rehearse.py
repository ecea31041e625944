"""`ranklab rehearse`: a notebook or a module runs on the CPU, under a GPU's rules.

What the rules are, and what can't be rehearsed: ranklab.engine.rehearse.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CELL_LIMIT = 300  # seconds; longer than the engine's, whose report of a hang says more


def rehearse(what, arguments=()):
    """`what` has run, a .ipynb file or a module; what a GPU would refuse is printed.

    Returns 0 when nothing raised, 1 when something did, 2 when there is no such file.
    """
    if not what.endswith(".ipynb"):
        return min(1, abs(subprocess.call([sys.executable, "-m", what, *arguments],
                                          env=os.environ | {"RANKLAB_REHEARSE": "gpu"})))
    path = Path(what)
    if not path.is_file():
        print(f"ranklab rehearse: there is no file {what}")
        return 2
    cells, errors = run(path)
    for number, source, error in errors:
        print(f"{path.name}, cell {number}, which begins with: {source.splitlines()[0]}\n{error}\n")
    print(f"{path.name}: {len(errors)} of {cells} cells with code raised under a GPU's rules")
    return int(bool(errors))


def run(path):
    """How many cells of the notebook ran, and (number, source, error) of those that raised.

    The notebook and your progress stay as they are; its cells run in its own folder.
    """
    import nbformat
    from jupyter_client import AsyncKernelManager
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="rl-") as home:
        environ = {**os.environ, "RANKLAB_HOME": home, "RANKLAB_REHEARSE": "gpu"}
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc",
                                    connection_file=os.path.join(home, "kernel.json"))
        NotebookClient(notebook, km=kernel, timeout=CELL_LIMIT, allow_errors=True,
                       extra_arguments=["--log-level=40"],  # errors only
                       resources={"metadata": {"path": str(path.parent)}}).execute(env=environ)
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    numbered = enumerate(code, 1)
    return len(code), [(number, cell.source, _text(output)) for number, cell in numbered
                       for output in cell.outputs if output.output_type == "error"
                       and "raises-exception" not in cell.metadata.get("tags", [])]


def _text(output):
    """What the cell showed of its error, without the terminal's colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output.traceback)).strip()
