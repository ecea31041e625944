"""Error messages for the learner: which rank failed, at which line of theirs, and why.

A rank sends frames as (file, line number, function); the text of the lines is looked up here, in
the parent, because only the kernel knows the text of its notebook's cells.
"""

import linecache
import re
import signal
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

ENGINE = str(Path(__file__).parent)
PACKAGE = str(Path(ENGINE).parent)
NOT_LEARNERS = tuple(str(Path(PACKAGE, name))
                     for name in ("engine", "course", "checks", "meter", "clinic/hooks.py",
                                  "clinic/wrappers.py", "magic.py", "pytest_plugin.py"))
PACKAGES = re.compile("/(site|dist)-packages/")  # including the user's and the system's packages
SHOWN = 12  # lines of a traceback
CAUSES = 6  # errors shown of a chain: half from its beginning, half from its end
LONGEST = 10_000  # characters of one message
RANGE = 5  # from this many consecutive ranks on, only the first and the last are named
CELL_MAGIC = "get_ipython().run_cell_magic("
MEMORY = " (often the system's memory ran out)"
# Each backend's message for a lost peer, with the class that it raises. A refused download, in
# contrast, is a ConnectionError of the learner's code.
LOST_PEER = {
    "RuntimeError": r"gloo/transport/\S+\] .{0,200}?(closed|reset|refused|closure|broken pipe)",
    "DistNetworkError": r"connection|broken pipe|got 0 bytes",
    "DistBackendError": r"ncclRemoteError|remote process exit",
}
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


class ShownShort:
    """An error of which a notebook shows only the message and the line of the cell."""

    def _render_traceback_(self):  # IPython asks for it
        frames = [Frame(f.filename, f.lineno, f.name)
                  for f in traceback.extract_tb(self.__traceback__)]
        # A cell magic is called from a line that contains the whole cell.
        lines = (str(f) for f in frames if f.is_of_learner() and CELL_MAGIC not in f.text())
        return [*lines, f"{type(self).__name__}: {self}"]


class RankError(ShownShort, RuntimeError):
    """A rank raised or died. `rank` is the one that caused it; `failures` maps ranks to reasons."""

    def __init__(self, message, rank=None, failures=None):
        super().__init__(message)
        self.rank = rank
        self.failures = failures or {}


class HangError(RankError, TimeoutError):
    """Some ranks did not finish in time; the message says where each one waits.

    failures: maps every rank to the call that it waits in, "returned", or "runs"
    """


class RanksInterrupted(ShownShort, KeyboardInterrupt):
    """Ctrl-C, or the notebook's stop button; the message says where each rank was."""


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def is_of_learner(self):
        is_installed = PACKAGES.search(self.file)
        return not (is_installed or self.file.startswith(
            (*NOT_LEARNERS, *LIBRARIES, "<frozen", "<string")))

    def place(self):
        return f"{_file_name(self.file)}, line {self.line}, in {self.function}"

    def text(self):
        return linecache.getline(self.file, self.line).strip()

    def __str__(self):
        text = self.text()
        return f"  {self.place()}" + (f"\n      {text}" if text else "")


@dataclass(frozen=True)
class Value:
    """The function's return value on a rank, pickled by ship.dumps."""

    pickled: bytes


@dataclass(frozen=True)
class Failure:
    """An exception on a rank, in a form that can always be sent."""

    kind: str
    message: str
    frames: tuple[Frame, ...]
    cause: "Failure | None" = None
    notes: tuple[str, ...] = ()

    @classmethod
    def from_error(cls, error):
        chain = _chain(error)
        failure, half = None, CAUSES // 2
        if len(chain) > CAUSES:
            chain[half:-half] = [Exception(f"... {len(chain) - CAUSES} errors more ...")]
        for link in chain:
            notes = tuple(map(str, getattr(link, "__notes__", ())))
            failure = cls(type(link).__name__, _message(link), _frames(link), failure, notes)
        return failure

    def headline(self):
        return f"{self.kind}: {self.message}" if self.message else self.kind

    def is_lost_peer(self):
        """Return True if this error only follows from the loss of another rank."""
        words = LOST_PEER.get(self.kind)
        return bool(words and re.search(words, self.message[:2000], re.I))

    def __str__(self):
        lines = list(map(str, _learner_frames(self.frames)))
        if len(lines) > SHOWN:  # endless recursion
            half = SHOWN // 2
            lines[half:-half] = [f"  ... {len(lines) - SHOWN} lines more ..."]
        text = "\n".join([*lines, *(f"  {note}" for note in self.notes)])
        if self.cause:
            text = f"{self.cause}\n  {self.cause.headline()}\n  which led to\n{text}"
        return text


def _chain(error):
    """List the first error, then the errors that it led to; in a cycle each error once."""
    chain = []
    while error is not None and not any(error is link for link in chain):
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return chain[::-1]


def _message(error):
    try:
        text = f"exit code {error.code}" if isinstance(error, SystemExit) else str(error)
        message = str.__str__(text)  # of a class of the learner's, perhaps, which the parent lacks
    except Exception as of_str:
        return f"(its message can't be shown: str() of it raised {type(of_str).__name__})"
    if len(message) > LONGEST:
        return f"{message[:LONGEST]} ... and {len(message) - LONGEST:,} characters more"
    return message


def _frames(error):
    frames = [Frame(f.filename, f.lineno or 0, f.name)
              for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and type(error.filename) is str:  # who raises it may put any
        frames.append(Frame(error.filename, int(error.lineno or 0), "<module>"))
    return tuple(frames)


def _learner_frames(frames):
    """Return the learner's own frames, or if there are none, the last two outside the engine."""
    of_learner = [f for f in frames if f.is_of_learner()]
    return of_learner or [f for f in frames if not f.file.startswith(NOT_LEARNERS)][-2:]


def _file_name(file):
    """Return the name by which the learner knows `file`: "Cell In[5]" for a notebook's cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell and (name := getattr(shell.compile, "format_code_name", lambda _: None)(file)):
        return " ".join(name)
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):  # outside the working folder, or that folder is gone
        return file


def describe_exit(code):
    """Describe in words what an exit code means."""
    if code >= 0:
        return f"ended without returning (os._exit, exit code {code})"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a realtime signal
        name = f"signal {-code}"
    return f"was killed by {name}" + (MEMORY if name == "SIGKILL" else "")


def count_ranks(size):
    """Return "1 rank", or "4 ranks"."""
    return f"{size} rank{'s' * (size != 1)}"


def rank_names(ranks):
    """Return "rank 3", "ranks 0, 2", or "ranks 0 to 31, 33"."""
    runs = []
    for rank in (ranks := list(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [f"{run[0]} to {run[-1]}" if len(run) >= RANGE else ", ".join(map(str, run))
             for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"
