"""One rank, as the parent sees it."""

import contextlib
import pickle
import socket
from dataclasses import dataclass, field
from typing import BinaryIO

from ranklab.engine import ship
from ranklab.engine.report import Failure, Value
from ranklab.engine.waiting import AT_STORE, FROM_STORE, NO, QUESTION, YES


@dataclass
class RankHandle:
    """What the parent knows of a rank: its value or error, how it ended, and where it was."""

    rank: int
    channel: socket.socket
    report_file: BinaryIO
    stack: bytearray = field(default_factory=bytearray)
    report: Value | Failure | None = None
    modules: list[str] = ()  # ranklab modules that it has imported
    pid: int | None = None
    exit_code: int | None = None
    last_words: str = ""  # C++'s message as it ended the rank
    seconds: float | None = None  # from the launch to the report
    questions: int = 0  # questions that it has not answered
    waits: bool = False  # its last answer: it waits only for other ranks
    store_calls: int = 0  # calls it has begun that wait at the store
    is_at_store: bool = False  # whether it is in such a call now

    def is_settled(self):
        return self.report is not None or self.exit_code is not None

    def has_failed(self):
        return self.is_settled() and not isinstance(self.report, Value)

    def ask(self):
        """Ask the rank whether it waits only for other ranks (waiting.py)."""
        self.waits, self.questions = False, self.questions + 1
        with contextlib.suppress(OSError):  # it is gone
            self.channel.send(QUESTION)

    def hear(self, data):
        """Interpret bytes from its channel; only the answer to the last question counts."""
        for answer in (byte for byte in data if byte in YES + NO):
            self.questions -= 1
            self.waits = not self.questions and answer in YES
        self.store_calls += data.count(AT_STORE)
        self.is_at_store = data.rfind(AT_STORE) > data.rfind(FROM_STORE) or (
            self.is_at_store and FROM_STORE not in data)

    def has_answered(self):
        return self.questions == 0 or self.exit_code is not None

    def stack_text(self):
        return self.stack.decode(errors="replace")

    def read_report(self):
        with ship.opened(self.report_file.fileno()) as content:
            self.report, self.modules = pickle.load(content), pickle.load(content)
        self.report_file.close()
