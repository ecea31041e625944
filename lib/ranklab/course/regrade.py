"""What runs in processes of its own when a class is graded: a learner's cells, then the judge.

Nothing that they print counts. What is found goes, line by line, to a log that lies outside of the
notebook's folder: a process that dies or hangs loses only what would have come after.

    run_cells  runs the cells and keeps each exercise's function or class, as a pickle
    judge_all  judges the kept ones in a fresh process, which the notebook never touched
"""

import ast
import builtins
import contextlib
import json
import os
import resource
import signal
import sys
import types
from pathlib import Path

import cloudpickle

from ranklab.course import labs
from ranklab.course.check import FAILED, judge, judge_prediction
from ranklab.engine import ship
from ranklab.engine.server import die_with

LARGEST_FILE = 4 << 30  # bytes that a learner's code may write to one file


class Log:
    """A file of JSON objects, one a line; each line is on the disk before anything else happens."""

    def __init__(self, path):
        self.path = path

    def add(self, **entry):
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def entries(self):
        """What was added; a last line that was cut off is left out."""
        text = self.path.read_text() if self.path.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def length(self):
        """How many bytes it has by now."""
        return self.path.stat().st_size if self.path.exists() else 0


def run_cells(folder):
    """The cells of task.json have run, as in a notebook; the exercises' objects are kept."""
    die_with(os.getppid())
    own_pid = os.getpid()
    if child := os.fork():  # a cell that kills its parent kills this process, not the grader
        os.waitpid(child, 0)
        return
    die_with(own_pid)
    _limit_damage()
    folder = Path(folder)
    task, log = json.loads((folder / "task.json").read_text()), Log(folder / "cells.log")
    shell = _shell()
    keeper = Keeper(shell, folder / "kept", log)
    shell.ast_transformers.append(KeepExercises(task["names"]))
    builtins.__ranklab_keep__ = keeper.keep  # not in the notebook's names: %reset deletes those
    for number, source in enumerate(task["cells"], start=1):
        log.add(begun=number)
        if error := _run_cell(shell, source, task["cell_limit"]):
            log.add(cell=number, error=error)
    log.add(finished=True)
    os._exit(0)  # threads that a cell has left behind don't matter any more


def _limit_damage():
    with contextlib.suppress(OSError, ValueError):  # ValueError: the limit here is lower already
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    with contextlib.suppress(OSError):  # when memory runs out, this process is the one to go
        Path("/proc/self/oom_score_adj").write_text("1000")


def _shell():
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    return InteractiveShell.instance(config=config, user_module=types.ModuleType("__main__"))


def _run_cell(shell, source, limit):
    """What the cell raised, in one line, or None. After `limit` seconds it is interrupted."""

    def time_is_up(*_):
        raise TimeIsUp(f"took longer than {limit:g} s")

    signal.signal(signal.SIGALRM, time_is_up)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        result = shell.run_cell(source, store_history=True)
        error = result.error_before_exec or result.error_in_exec
    except BaseException as broken:  # the notebook has broken IPython itself
        error = broken
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return one_line(error) if error else None


class TimeIsUp(BaseException):
    """Not an Exception, so that a learner's `except Exception` does not swallow it."""


def one_line(error):
    """ "TypeError: what it says", cut to a line"""
    text = str(error).strip().partition("\n")[0][:120]
    return text if isinstance(error, TimeIsUp) else f"{type(error).__name__}: {text}".rstrip(": ")


class KeepExercises(ast.NodeTransformer):
    """A cell's code keeps each exercise's object: where it is defined, and before it is replaced.

    Before `f = check(f)` once more, because by then f's helpers exist that come below it.
    """

    def __init__(self, names):
        self.names = set(names)

    def visit_FunctionDef(self, node):
        return [node, _keep(node, node.name, True)] if node.name in self.names else node

    visit_ClassDef = visit_AsyncFunctionDef = visit_FunctionDef  # none looks inside

    def visit_Assign(self, node):
        targets = {target.id for target in node.targets if isinstance(target, ast.Name)}
        return [*(_keep(node, name, False) for name in sorted(targets & self.names)), node]


def _keep(node, name, is_definition):
    statement = ast.parse(f"__ranklab_keep__({name!r}, {is_definition})").body[0]
    for part in ast.walk(statement):
        ast.copy_location(part, node)
    return statement


class Keeper:
    """Writes the objects, by value, as they are at the moment."""

    def __init__(self, shell, folder, log):
        self.shell, self.folder, self.log = shell, folder, log
        self.defined = {}

    def keep(self, name, is_definition):
        """The object called `name` is kept; at an assignment only if the notebook defined it."""
        found = self.shell.user_ns.get(name)
        if is_definition:
            self.defined[name] = found
        elif found is None or found is not self.defined.get(name):
            return
        try:
            part = self.folder / f"{name}.part"
            # Without torch there are no tensors, and to import it now would take seconds.
            dumps = ship.dumps if "torch" in sys.modules else cloudpickle.dumps
            part.write_bytes(dumps(found))
            part.replace(self.folder / f"{name}.pickle")
        except Exception as error:
            self.log.add(unkept=name, error=one_line(error))


def judge_all(folder, *names):
    """Each of `names`, predictions and kept exercises, has its verdict in the log, in order."""
    die_with(os.getppid())
    folder = Path(folder)
    task, log = json.loads((folder / "task.json").read_text()), Log(folder / "verdicts.log")
    checks = labs.checks_of(task["stem"])
    _limit_damage()
    log.add(ready=True)  # what was imported until now is not on a learner's clock
    items = {item.name: item for item in (*checks.PREDICTIONS, *checks.EXERCISES)}
    for name in names:
        text = task["predictions"].get(name)
        state, reason = (_judge_number(items[name], text) if text else
                         _judge_kept(items[name], folder / "kept" / f"{name}.pickle"))
        log.add(name=name, state=state, reason=reason)
    os._exit(0)


def _judge_number(prediction, text):
    from ranklab.interview.expression import evaluate

    try:
        value = evaluate(text, {"math": __import__("math")})
    except Exception:
        return FAILED, f"{text[:60]} is not plain arithmetic"
    state, line = judge_prediction(prediction, value)
    return state, line[6:].partition("\n")[0]


def _judge_kept(exercise, path):
    try:
        learners = ship.loads(path.read_bytes())
    except Exception as error:
        return FAILED, f"it can't be used outside of its notebook: {one_line(error)}"
    verdict = judge(exercise, learners)
    return verdict.state, verdict.mistake.what.partition("\n")[0] if verdict.mistake else ""
