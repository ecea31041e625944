"""How fast are the collectives here? nccl-tests' columns, for our algorithms and the backend's."""

from ranklab.projects.collectives.timing import figure, run, summary, table

__all__ = ["figure", "links", "run", "summary", "table"]
