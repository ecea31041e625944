"""What the learner reads when something went wrong: which rank, which line of theirs, and why.

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
                     for name in ("engine", "course", "checks", "meter"))
TORCH_DISTRIBUTED = "/torch/distributed/"
WAITS = ("all_", "barrier", "batch_isend", "broadcast", "destroy_process", "gather", "init_",
         "irecv", "isend", "monitored", "new_", "recv", "reduce", "scatter", "send", "split_group",
         "wait")  # beginnings of names
PACKAGES = re.compile("/(site|dist)-packages/")  # also those of the user, or of the system
SHOWN = 12  # lines of a traceback
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class ShownShort:
    """An error of which a notebook shows the line of the cell and the message; no engine frames."""

    def _render_traceback_(self):  # IPython asks for it
        frames = [Frame(f.filename, f.lineno, f.name)
                  for f in traceback.extract_tb(self.__traceback__)]
        return [*(str(f) for f in frames if f.is_learners()), f"{type(self).__name__}: {self}"]


class RankError(ShownShort, RuntimeError):
    """A rank raised or died. `rank` is the first to blame; `failures` maps ranks to reasons."""

    def __init__(self, message, rank=None, failures=None):
        super().__init__(message)
        self.rank = rank
        self.failures = failures or {}


class HangError(RankError, TimeoutError):
    """Some ranks did not finish in time; the message says where each one waits."""


class RanksInterrupted(ShownShort, KeyboardInterrupt):
    """Ctrl-C, or the notebook's stop button; the message says where each rank was."""


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def is_learners(self):
        installed = PACKAGES.search(self.file)
        theirs = self.file.startswith((*NOT_LEARNERS, *LIBRARIES, "<frozen", "<string"))
        return not (installed or theirs)

    def where(self):
        return f"{_file_name(self.file)}, line {self.line}, in {self.function}"

    def text(self):
        return linecache.getline(self.file, self.line).strip()

    def __str__(self):
        text = self.text()
        return f"  {self.where()}" + (f"\n      {text}" if text else "")


@dataclass(frozen=True)
class Value:
    """What the function returned on a rank, as ship.dumps made it."""

    pickled: bytes


@dataclass(frozen=True)
class Failure:
    """An exception on a rank, in a form that always travels."""

    kind: str
    message: str
    frames: tuple[Frame, ...]
    cause: "Failure | None" = None

    @classmethod
    def of(cls, error):
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        frames = [Frame(f.filename, f.lineno or 0, f.name)
                  for f in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SyntaxError) and error.filename:
            frames.append(Frame(error.filename, error.lineno or 0, "<module>"))
        message = f"exit code {error.code}" if isinstance(error, SystemExit) else str(error)
        return cls(type(error).__name__, message, tuple(frames), cause and cls.of(cause))

    def headline(self):
        if self.is_lost_peer():
            return "lost the connection to a rank that had gone"
        return f"{self.kind}: {self.message}" if self.message else self.kind

    def is_lost_peer(self):
        """True where this only echoes that another rank went away."""
        return bool(re.search(r"(connection|pair).*(closed|reset|closure|refused)|broken pipe"
                              r"|remote process exited", self.message, re.I))

    def __str__(self):
        lines = list(map(str, _learners(self.frames)))
        if len(lines) > SHOWN:  # endless recursion
            half = SHOWN // 2
            lines[half:-half] = [f"  ... {len(lines) - SHOWN} lines more ..."]
        text = "\n".join(lines)
        if self.cause:
            text = f"{self.cause}\n  {self.cause.headline()}\n  which led to\n{text}"
        return text


def _learners(frames):
    """The learner's own frames; where there are none, the last two of all but the engine."""
    own = [f for f in frames if f.is_learners()]
    return own or [f for f in frames if not f.file.startswith(NOT_LEARNERS)][-2:]


def _file_name(file):
    """`file` as the learner knows it: "Cell In[5]" for a notebook's cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell and (name := getattr(shell.compile, "format_code_name", lambda _: None)(file)):
        return " ".join(name)
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file


@dataclass(frozen=True)
class Stack:
    """Where a rank was when it was asked: the main thread's frames, innermost first."""

    frames: tuple[Frame, ...]

    @staticmethod
    def is_whole(dump):
        """True once the server's first line is in it: the outermost frame, which comes last."""
        return b'"<string>", line 1 in <module>' in dump

    @classmethod
    def parse(cls, dump):
        """From faulthandler's text; the main thread stands last in it."""
        main_thread = re.split(r"^(?:Current thread|Thread) 0x", dump, flags=re.M)[-1]
        found = re.findall(r'File "(.*)", line (\d+) in (.*)', main_thread)
        return cls(tuple(Frame(file, int(line), name) for file, line, name in found))

    def own(self):
        """The learner's innermost frame; the library's, where a project calls it; or None."""
        learners = [f for f in self.frames if f.is_learners()]
        outside = [f for f in learners if not f.file.startswith(PACKAGE)]
        return next(iter(outside or learners), None)

    def call(self):
        """What the learner's line waits in, e.g. "all_reduce"; None if it does not communicate."""
        own = self.own()
        inner = self.frames[: self.frames.index(own)] if own else self.frames
        waits = [f for f in inner
                 if TORCH_DISTRIBUTED in f.file and f.function.startswith(WAITS)]
        collectives = [f for f in waits if f.file.endswith("distributed_c10d.py")]
        names = [f.function for f in collectives or waits]
        return names[-1] if names else None  # the outermost: what the learner's line called

    def __str__(self):
        own, call = self.own(), self.call()
        if own is None:
            return self._without_own_line(call)
        text = own.text()
        doing = f"waits in {call}" if call else "is"
        return f"{doing} at {own.where()}" + (f":  {text}" if text else "")

    def _without_own_line(self, call):
        if not self.frames:
            return "did not say where: it was still starting, or answers no signals"
        engines = [f.function for f in self.frames if f.file.startswith(ENGINE)]
        if engines[:1] == ["_run"]:
            return f"waits in {call}" if call else "is inside the function that was launched"
        return "was sending its value back" if engines[:1] == ["dumps"] else "was still starting"


def describe_exit(code, output_of_faulthandler=""):
    """What an exit code means, in words, with the learner's line if the rank left a stack."""
    if code >= 0:
        text = f"ended without returning (os._exit, exit code {code})"
    else:
        name = signal.Signals(-code).name
        hint = " (often the system's memory ran out)" if name == "SIGKILL" else ""
        text = f"was killed by {name}{hint}"
    own = Stack.parse(output_of_faulthandler).own()
    return f"{text}\n\n{own}" if own else text


def rank_names(ranks):
    """ "rank 3", "ranks 0, 2" """
    ranks = list(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
