"""A GPT trained over data, tensor and pipeline ranks; compare.py compares layouts in a table."""

from ranklab.projects.hybrid.config import JOBS
from ranklab.projects.hybrid.training import dry_run_report, report, run

__all__ = ["JOBS", "compare", "dry_run_report", "report", "run"]
