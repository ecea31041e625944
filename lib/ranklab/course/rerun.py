"""A submitted notebook, run again from top to bottom in a fresh kernel, where `check` judges anew.

First come the notebook's cells. Then each exercise that has not passed is defined once more and
checked: its cell may have failed, or its helpers may be defined below it. A cell that ends the
kernel or takes too long is left out, and the others run again.
"""

import contextlib
import time
from pathlib import Path

import psutil

from ranklab.course import progress
from ranklab.course.notebook import fresh_client
from ranklab.course.outline import is_passed
from ranklab.engine.server import PR_SET_CHILD_SUBREAPER, prctl

# torch is imported before the clock starts, and what an endless loop prints is not kept.
START = "import os, sys, ranklab.course.check; sys.stdout = sys.stderr = open(os.devnull, 'w')"
START_LIMIT = 120  # seconds
CELL_SHARE = 0.3  # the part of a notebook's time that one cell may take
DEATH_LIMIT = 5  # seconds for killed processes to end


class Rerun:
    """The run of one notebook.

    records   {name: what `check` recorded of it}
    problems  {"code cell 3" or an exercise: what went wrong there}, in order
    """

    def __init__(self, notebook, folder: Path, seconds):
        """Run the notebook in `folder`, an empty one; end all processes that it has started.

        seconds  for all cells and checks
        """
        self.notebook, self.folder = notebook, folder
        self.cell_limit, self.seconds_left = seconds * CELL_SHARE, seconds
        self.records, self.problems = {}, {}
        self.steps = {f"code cell {number}": cell for number, cell in enumerate(notebook.cells, 1)}
        self.steps |= {name: f"{text}\n{name} = __import__('ranklab').check({name})"
                       for name, text in notebook.sources.items()
                       if name not in notebook.untouched}
        for name in ("work", "tmp", "home"):
            (folder / name).mkdir()
        for name, content in notebook.files_beside.items():
            (folder / "work" / name).write_bytes(content)
        with nothing_left_behind():
            while (broken := self._run_steps()) and self.seconds_left > 0:
                del self.steps[broken]

    def _run_steps(self):
        """Run the steps in one kernel; return the one that broke it or used up the time."""
        from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
        from nbformat.v4 import new_code_cell, new_notebook

        cells = [new_code_cell(source) for source in (START, *self.steps.values())]
        copy = new_notebook(cells=cells, metadata={"ranklab": {"stem": self.notebook.stem}})
        with fresh_client(copy, self.folder / "work", self._environ()) as client:
            client.timeout = START_LIMIT
            client.execute_cell(cells[0], 0)
            for index, step in enumerate(self.steps, 1):
                if is_passed(step, self.records):
                    continue
                start, problem, is_broken = time.monotonic(), None, False
                client.timeout = max(1, round(min(self.cell_limit, self.seconds_left)))
                try:
                    client.execute_cell(cells[index], index)
                except CellExecutionError as error:
                    problem = f"raised {error.ename}: {error.evalue}"
                except CellTimeoutError:
                    problem, is_broken = f"took longer than {client.timeout} s", True
                except DeadKernelError:
                    problem, is_broken = "ended its process", True
                if problem:
                    self.problems.setdefault(step, problem)
                self.seconds_left -= time.monotonic() - start
                self.records = progress.load(self.folder / "home")
                if is_broken or self.seconds_left <= 0:
                    return step
        return None

    def _environ(self):
        home, tmp = str(self.folder / "home"), str(self.folder / "tmp")
        return {"RANKLAB_HOME": home, "IPYTHONDIR": home, "MPLBACKEND": "agg", "TMPDIR": tmp,
                "TORCHINDUCTOR_CACHE_DIR": tmp}


@contextlib.contextmanager
def nothing_left_behind():
    """Kill the processes that were started inside; on Linux also those whose parent has ended."""
    before = psutil.Process().children()
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # killing a process hands its children to this one
    try:
        yield
    finally:
        deadline = time.monotonic() + DEATH_LIMIT
        while (started := [child for child in psutil.Process().children() if child not in before]
               ) and time.monotonic() < deadline:
            for child in started:
                with contextlib.suppress(psutil.Error):
                    child.kill()
            psutil.wait_procs(started, timeout=0.2)
        prctl(PR_SET_CHILD_SUBREAPER, 0)
