"""Runs a lab's cells in one process, without Jupyter.

    python rehearse_cells.py labs/00_ranks.ipynb cells.json

cells.json  of every code cell: [its source, what it raised or ""]
stdin       {text of a cell: what runs in its place}, as JSON
"""

import contextlib
import io
import json
import os
import sys
import traceback
from pathlib import Path


def main(notebook, report):
    cells = json.loads(Path(notebook).read_text())["cells"]
    sources = shortened(cells, json.load(sys.stdin))
    from IPython.core.interactiveshell import InteractiveShell

    shell, folder = InteractiveShell.instance(), os.getcwd()
    os.chdir(Path(notebook).parent)
    seen = []
    for source in sources:
        with contextlib.redirect_stdout(io.StringIO()):
            ran = shell.run_cell(source)
        error = ran.error_before_exec or ran.error_in_exec
        seen.append((source, "".join(traceback.format_exception(error)) if error else ""))
    os.chdir(folder)
    Path(report).write_text(json.dumps(seen))


def shortened(cells, shorter):
    """The sources of the code cells; each text of `shorter` must be in one."""
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for text, instead in shorter.items():
        assert any(text in source for source in sources), f"no cell has {text!r}"
        sources = [source.replace(text, instead) for source in sources]
    return [source for source in sources if source.strip()]


if __name__ == "__main__":
    main(*sys.argv[1:])
