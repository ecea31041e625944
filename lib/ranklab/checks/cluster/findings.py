"""What a check finds in a script or a rule, with details that are told where it is not right."""

from dataclasses import dataclass, field
from typing import Any

from ranklab.checks.prover import Told


@dataclass(frozen=True)
class Finding:
    """A value that is compared, and details that are not: what the shell says, say."""

    value: Any
    details: str = field(compare=False)

    def __str__(self):
        return str(self.value)


def finding(value, details):
    return Told(Finding(value, details), lambda got, _: got.details)
