"""The exercises and predictions of lab 10, in the order of the lab."""

from ranklab.checks.context_parallel.memory import MEMORY
from ranklab.checks.context_parallel.merge import MERGE
from ranklab.checks.context_parallel.predictions import PREDICTIONS
from ranklab.checks.context_parallel.ring import BACKWARD, FORWARD
from ranklab.checks.context_parallel.shards import DOCUMENTS, ZIGZAG
from ranklab.checks.context_parallel.tiled import TILED
from ranklab.checks.context_parallel.ulysses import ULYSSES

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    MEMORY, MERGE, FORWARD, BACKWARD, ZIGZAG, ULYSSES, DOCUMENTS, TILED,
)
