"""One rank, as the parent sees it."""

import pickle
import socket
from dataclasses import dataclass, field
from typing import BinaryIO

from ranklab.engine import ship
from ranklab.engine.report import Failure, Value
from ranklab.engine.stack import Stack


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
    seconds: float | None = None  # from the launch to the report

    def is_settled(self):
        return self.report is not None or self.exit_code is not None

    def has_failed(self):
        return self.is_settled() and not isinstance(self.report, Value)

    def is_stuck(self):
        """True for a rank that has said where it is, and will not go on unless another does."""
        stack = Stack.parse(self.stack_text())
        return stack.threads == 1 and (isinstance(self.report, Value) or stack.is_stuck())

    def stack_text(self):
        return self.stack.decode(errors="replace")

    def read_report(self):
        with ship.opened(self.report_file.fileno()) as content:
            self.report, self.modules = pickle.load(content), pickle.load(content)
        self.report_file.close()
