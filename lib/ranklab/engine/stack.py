"""Reads from the frames that faulthandler wrote where a rank is."""

import re
from dataclasses import dataclass

from ranklab.engine.report import ENGINE, PACKAGE, Frame

TORCH_DISTRIBUTED = "/torch/distributed/"
WAITS = ("all_", "barrier", "batch_isend", "broadcast", "destroy_process", "gather", "init_",
         "irecv", "isend", "monitored", "new_", "recv", "reduce", "scatter", "send", "split_group",
         "wait")  # beginnings of names


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
        """A Stack from faulthandler's text, in which the main thread comes last."""
        before, *threads = re.split(r"^(?:Current thread|Thread) 0x", dump, flags=re.M)
        found = re.findall(r'File "(.*)", line (\d+) in (.*)', threads[-1] if threads else before)
        frames = tuple(Frame(file, int(line), name) for file, line, name in found)
        return cls(frames)

    def own(self):
        """The learner's innermost frame; the library's, where a project calls it; or None."""
        of_learner = [f for f in self.frames if f.is_of_learner()]
        outside = [f for f in of_learner if not f.file.startswith(PACKAGE)]
        return next(iter(outside or of_learner), None)

    def call(self):
        """What the learner's line waits in, e.g. "all_reduce"; None if it does not communicate."""
        own = self.own()
        inner = self.frames[: self.frames.index(own)] if own else self.frames
        waits = [f for f in inner
                 if TORCH_DISTRIBUTED in f.file and f.function.startswith(WAITS)]
        collectives = [f for f in waits if f.file.endswith("distributed_c10d.py")]
        names = [f.function for f in collectives or waits]
        return names[-1] if names else None  # the outermost: what the learner's line called

    def describe(self, waits=False):
        """Where the rank is, in words; `waits` is True where it has said that it waits."""
        own, call = self.own(), self.call()
        if own is None:
            return self._without_own_line(call)
        text = own.text()
        doing = f"waits in {call}" if call else "waits" if waits else "is"
        return f"{doing} at {own.where()}" + (f":  {text}" if text else "")

    def _without_own_line(self, call):
        if not self.frames:
            return "did not say where: it was still starting, or answers no signals"
        engines = [f.function for f in self.frames if f.file.startswith(ENGINE)
                   and not f.file.endswith("waiting.py")]  # Work.wait
        if engines[:1] == ["_run"]:
            return f"waits in {call}" if call else "is inside the function that was launched"
        return "was sending its value back" if engines[:1] == ["dumps"] else "was still starting"
