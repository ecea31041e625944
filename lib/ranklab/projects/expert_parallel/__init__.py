"""A GPT with experts beside a dense one of equal FLOPs."""

from ranklab.projects.expert_parallel.report import report
from ranklab.projects.expert_parallel.training import run

__all__ = ["report", "run"]
