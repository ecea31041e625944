"""Notebooks: which cells the builder wrote, whether anybody changed them, and running them.

The builder keeps the hash of all cells in a notebook's metadata, and Jupyter leaves it there. So
"as it was built" is known even after a run was saved: outputs and counts are not in the hash.
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import NamedTuple


class Cells(NamedTuple):
    """Two hashes of a notebook's cells: as the builder wrote them, and as they are now."""

    built: str | None
    now: str | None

    @property
    def as_built(self):
        return self.now is not None and self.now == self.built


def cells_hash(cells):
    """Hash what a person writes: kind, text and tags of each cell.

    Empty cells at the end don't count: Shift+Enter in the last cell makes one.
    """
    content = [[c["cell_type"], "".join(c["source"]), c["metadata"].get("tags", [])]
               for c in cells]
    while content and not content[-1][1].strip():
        content.pop()
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def digest(source):
    """Compute the start of the id that the builder gives to a cell with this text."""
    return hashlib.sha256(source.encode()).hexdigest()[:10]


def read_cells(path):
    """Read the Cells of the notebook at `path`; both None where it can't be read as one."""
    try:
        notebook = json.loads(Path(path).read_text(encoding="utf-8"))
        now = cells_hash(notebook["cells"])
        ranklab = notebook["metadata"].get("ranklab") or {}
        return Cells(ranklab.get("cells"), now)
    except (ValueError, LookupError, TypeError, AttributeError):
        return Cells(None, None)


def run_cells(notebook, folder, limit, environ, **options):
    """Execute `notebook` from top to bottom in `folder`, on a fresh kernel; keep its outputs in it.

    limit: seconds for a cell
    environ: variables added to this process's environment; the learner's progress is not touched
    options: for nbclient's NotebookClient, whose errors it raises
    """
    with fresh_client(notebook, folder, environ, timeout=limit, **options) as client:
        client.execute()


@contextlib.contextmanager
def fresh_client(notebook, folder, environ, **options):
    """Yield an nbclient client for `notebook`, with a fresh kernel that ends with the block.

    folder, environ, options: as for run_cells
    """
    from jupyter_client import AsyncKernelManager
    from jupyter_core.utils import run_sync
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory(prefix="rl-") as home:
        # Through socket files: a TCP port that Jupyter chose may be taken before it is bound.
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc",
                                    connection_file=os.path.join(home, "kernel.json"))
        client = NotebookClient(notebook, km=kernel, extra_arguments=["--log-level=40"],  # errors
                                resources={"metadata": {"path": str(folder)}}, **options)
        # Where `begin` finds it, and not the file of an earlier build in the folder.
        path = Path(home, "notebook.ipynb")
        path.write_text(json.dumps(notebook), encoding="utf-8")
        try:
            with client.setup_kernel(env={**os.environ, "RANKLAB_HOME": home,
                                          "JPY_SESSION_NAME": str(path), **environ}):
                yield client
                client.kc.stop_channels()
        finally:  # the client leaves a kernel running that it was given, and its ranks' server too
            run_sync(kernel.shutdown_kernel)(now=True)


def plain(text):
    """Remove the terminal's colours from what a cell showed."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
