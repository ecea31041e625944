"""A GPT on real text, on one device: the baseline of every later lab."""

from ranklab.projects.baseline.training import report, run

__all__ = ["report", "run"]
