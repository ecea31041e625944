"""A GPT on sequences that are too long for one rank, and what the long context is worth."""

from ranklab.projects.context_parallel.training import report, run

__all__ = ["report", "run"]
