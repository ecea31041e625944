"""A GPT on real text, split over ranks: naively, by our tensor parallelism, and by DTensor."""

from ranklab.projects.tensor_parallel.training import report, run

__all__ = ["links", "report", "run"]
