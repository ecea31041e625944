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
    """What is known of it: its value or its error, how it ended, and where it was."""

    rank: int
    channel: socket.socket
    report_file: BinaryIO
    stack: bytearray = field(default_factory=bytearray)
    report: Value | Failure | None = None
    modules: list[str] = ()  # of ranklab's, that it has imported
    pid: int | None = None
    exit_code: int | None = None
    last_words: str = ""  # what C++ printed as it ended the rank
    seconds: float | None = None  # from the launch to the report
    questions: int = 0  # that it has not answered
    waits: bool = False  # for other ranks and for nothing else: its answer to the last question
    store_calls: int = 0  # that it has begun: calls that wait at the store
    is_at_store: bool = False  # in one of them

    def is_settled(self):
        return self.report is not None or self.exit_code is not None

    def has_failed(self):
        return self.is_settled() and not isinstance(self.report, Value)

    def ask(self):
        """Ask the rank whether it waits for other ranks alone (waiting.py)."""
        self.waits, self.questions = False, self.questions + 1
        with contextlib.suppress(OSError):  # it is gone
            self.channel.send(QUESTION)

    def hear(self, data):
        """Read bytes that came through its channel; the last question's answer counts."""
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
