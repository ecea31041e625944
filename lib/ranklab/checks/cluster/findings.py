"""A check's findings in a script or a rule, with details to report where a value is wrong."""

from dataclasses import dataclass, field
from typing import Any

from ranklab.checks.prover import Told


@dataclass(frozen=True)
class Finding:
    """A value that is compared, and details that are not, such as the shell's output."""

    value: Any
    details: str = field(compare=False)

    def __str__(self):
        return str(self.value)


def finding(value, details):
    return Told(Finding(value, details), lambda got, _: got.details)
