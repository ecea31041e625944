"""A GPT with experts, compared with a dense one of equal FLOPs."""

from ranklab.projects.expert_parallel.training import report, run

__all__ = ["report", "run"]
