"""What runs in processes of its own when a class is graded: a learner's cells, then the judges.

    run_cells   runs the cells, and keeps each exercise's function or class as a pickle
    judge_kept  judges one of these in a process that the cells never touched

Each runs in a fork of clean_process.py.

Nothing that they print counts. What is found goes through a pipe, line by line: a process that dies
or hangs loses only what would have come after.
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

from ranklab.course import labs
from ranklab.course.check import FAILED, judge
from ranklab.engine import ship
from ranklab.engine.forkserver import fork_server_from_here
from ranklab.engine.server import die_with

LARGEST_FILE = 4 << 30  # bytes that a learner's code may write to one file
# Whose functions a check relies on, beside all of ranklab. Of torch's only those that are written
# in C, such as torch.equal: importing torch._dynamo, as a check may, wraps torch.manual_seed.
WATCHED = ("builtins", "json", "math", "operator", "os", "pickle", "torch")


def run_cells(pipe):
    """The given cells have run, as in a notebook; the exercises' objects are in ../kept."""
    own_pid = os.getpid()
    if child := os.fork():  # a cell that kills its parent kills this process, not the grader
        os.waitpid(child, 0)
        return
    die_with(own_pid)
    fork_server_from_here()  # before anything of the learner's is here
    task = json.loads(_given())
    shell = _shell()
    sys.path.insert(0, os.getcwd())
    keeper = Keeper(shell, Path.cwd().parent / "kept", pipe)
    shell.ast_transformers.append(KeepExercises(task["names"]))
    builtins.__ranklab_keep__ = keeper.keep  # not in the notebook's names: %reset deletes those
    for number, source in task["cells"]:
        _say(pipe, begun=number)
        if error := _run_cell(shell, source, task["cell_limit"]):
            _say(pipe, cell=number, error=error)
    keeper.keep_again()
    _say(pipe, finished=True)
    os._exit(0)  # threads that a cell has left behind don't matter any more


def _given():
    """What the grader has sent, which can't be read twice. Limits now keep damage small."""
    given = sys.stdin.buffer.read()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    with contextlib.suppress(OSError, ValueError):  # ValueError: the limit here is lower already
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    with contextlib.suppress(OSError):  # when memory runs out, the system ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    return given


def _say(pipe, **entry):
    with contextlib.suppress(OSError):  # a cell has closed it
        os.write(pipe, json.dumps(entry).encode() + b"\n")


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

    visit_ClassDef = visit_AsyncFunctionDef = visit_FunctionDef  # nothing looks inside

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

    def __init__(self, shell, folder, pipe):
        self.shell, self.folder, self.pipe = shell, folder, pipe
        self.defined = {}
        self.names = {}  # of each kept object: what the notebook's names meant by then

    def keep(self, name, is_definition):
        """The object called `name` is kept; at an assignment only if the notebook defined it."""
        found = self.shell.user_ns.get(name)
        if is_definition:
            self.defined[name] = found
        elif found is None or found is not self.defined.get(name):
            return
        self.names[name] = dict(self.shell.user_ns)
        try:
            self._write(name)
        except Exception as error:
            _say(self.pipe, unkept=name, error=one_line(error))

    def keep_again(self):
        """All are kept once more, now with helpers that were defined after them."""
        later = dict(self.shell.user_ns)
        for name, names in self.names.items():
            self.shell.user_ns.update({**later, **names})
            with contextlib.suppress(Exception):  # then the one kept before stays
                self._write(name)

    def _write(self, name):
        part = self.folder / f"{name}.part"
        part.write_bytes(ship.dumps(self.defined[name]))
        part.replace(self.folder / f"{name}.pickle")


def judge_kept(pipe):
    """The one exercise that was given is judged: its state, the reason and the hint that names the
    mistake go through the pipe.

    The line begins with a word that the grader has drawn for it. While the learner's code runs, the
    word is only in this function's own variables, and what is called after it was looked up before.
    """
    fork_server_from_here()
    task, _, kept = _given().partition(b"\n")
    stem, name, word = json.loads(task)
    exercise = next(one for one in labs.checks_of(stem).EXERCISES if one.name == name)
    sys.path.append(os.getcwd())  # last, so that the .py files beside the notebook hide no module
    write, leave, judge_it, before = os.write, os._exit, judge, _meanings(exercise)
    write(pipe, f"{word}\tready\n".encode())  # what was imported by now is not on a learner's clock
    state, reason, hint = FAILED, "", ""
    try:
        learner_fn = ship.loads(kept)
    except Exception as error:
        reason = f"it can't be used outside of its notebook: {one_line(error)}"
    else:
        verdict = judge_it(exercise, learner_fn)
        state = verdict.state
        if verdict.mistake:
            reason, hint = verdict.mistake.what.partition("\n")[0], verdict.mistake.hint
    for label, names, key, item, code in before:
        if names.get(key) is not item or code is not None and item.__code__ is not code:
            state, reason, hint = FAILED, f"it changed {label}.{key} while it was checked", ""
            break
    said = "\t".join(" ".join(text.split()) for text in (word, state, reason, hint))
    write(pipe, f"{said}\n".encode(errors="replace"))
    leave(0)


def _meanings(exercise):
    """[(where, names, name, object, its code)] of all that may not change during a check."""
    spaces = [("its exercise", vars(exercise))]
    for label, module in list(sys.modules.items()):
        if label in WATCHED or label.partition(".")[0] == "ranklab":
            spaces.append((label, vars(module)))
            spaces += [(f"{label}.{key}", vars(item)) for key, item in vars(module).items()
                       if isinstance(item, type) and item.__module__ == label]
    return [(label, names, key, item, getattr(item, "__code__", None))
            for label, names in spaces for key, item in names.items() if callable(item)
            and (label != "torch" or isinstance(item, types.BuiltinFunctionType))]
