"""A GPT trained over data, tensor and pipeline ranks; compare.py puts layouts in one table."""

from ranklab.projects.hybrid.report import dry_run_report, report
from ranklab.projects.hybrid.training import run

__all__ = ["dry_run_report", "report", "run"]
