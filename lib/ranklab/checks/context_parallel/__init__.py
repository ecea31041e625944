"""The exercises and predictions of lab 10, in the order of the lab."""

from ranklab import context_parallel as cp
from ranklab.checks.context_parallel.memory import MEMORY
from ranklab.checks.context_parallel.merge import MERGE
from ranklab.checks.context_parallel.predictions import PREDICTIONS
from ranklab.checks.context_parallel.ring import BACKWARD, FORWARD
from ranklab.checks.context_parallel.shards import ZIGZAG, check_shard_documents
from ranklab.checks.context_parallel.ulysses import ULYSSES
from ranklab.checks.exercise import Exercise

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    MEMORY, MERGE, FORWARD, BACKWARD, ZIGZAG, ULYSSES,
    Exercise(cp.shard_documents, check_shard_documents, hints=(
        "How much work is a document of n tokens? Which one alone is more than a rank's share?",
        "Cut the long ones into 2R parts, an early and a late one for each rank. The others, "
        "longest first, go whole to the rank with the least work that has room.",
        "Keep for each rank the room that is left and the pairs that it has. If no rank has room "
        "for a whole document, fill the rank with the most room, and go on with the rest. Of a "
        "document that is cut, deal the first n % (2 * ranks) tokens one by one.",
    )),
)
