"""A GPT on real text, on one device: what every later lab is compared with."""

from ranklab.projects.baseline.training import report, run

__all__ = ["report", "run"]
