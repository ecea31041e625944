"""Read where a rank is from the frames that faulthandler wrote."""

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
        """Return True once the outermost frame, the server's first line, is in the dump."""
        return b'"<string>", line 1 in <module>' in dump

    @classmethod
    def parse(cls, dump):
        """Read faulthandler's text, in which the main thread comes last."""
        before, *threads = re.split(r"^(?:Current thread|Thread) 0x", dump, flags=re.M)
        text = threads[-1] if threads else before
        frames = re.findall(r'File "(.*)", line (\d+) in (.*)', text)
        return cls(tuple(Frame(file, int(line), name) for file, line, name in frames))

    def learner_frame(self):
        """Return the learner's innermost frame, or the library's below a project, or None."""
        of_learner = [f for f in self.frames if f.is_of_learner()]
        outside = [f for f in of_learner if not f.file.startswith(PACKAGE)]
        return next(iter(outside or of_learner), None)

    def call(self):
        """Return the call in which the learner's line waits: "all_reduce"; None: no communication.
        """
        frame = self.learner_frame()
        inner = self.frames[: self.frames.index(frame)] if frame else self.frames
        waits = [f for f in inner
                 if TORCH_DISTRIBUTED in f.file and f.function.startswith(WAITS)]
        collectives = [f for f in waits if f.file.endswith("distributed_c10d.py")]
        names = [f.function for f in collectives or waits]
        return names[-1] if names else None  # the outermost: what the learner's line called

    def describe(self, waits=False):
        """Describe where the rank is; `waits`: it has answered that it waits."""
        frame, call = self.learner_frame(), self.call()
        if frame is None:
            return self._without_learner_frame(call)
        text = frame.text()
        state = f"waits in {call}" if call else "waits" if waits else "is"
        return f"{state} at {frame.place()}" + (f":  {text}" if text else "")

    def _without_learner_frame(self, call):
        if not self.frames:
            return "did not say where: it was still starting, or answers no signals"
        engines = [f.function for f in self.frames if f.file.startswith(ENGINE)
                   and not f.file.endswith("waiting.py")]  # Work.wait
        if engines[:1] == ["_run"]:
            return f"waits in {call}" if call else "is inside the function that was launched"
        return "was sending its value back" if engines[:1] == ["dumps"] else "was still starting"
