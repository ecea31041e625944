"""A GPT trained over data, tensor and pipeline ranks; compare.py puts layouts in one table."""

from ranklab.projects.hybrid.training import dry_run_report, report, run

__all__ = ["dry_run_report", "report", "run"]
