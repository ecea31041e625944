"""A GPT trained through a pipeline, and a monitor of its bubble."""

from ranklab.projects.pipeline_parallel.report import report
from ranklab.projects.pipeline_parallel.training import run

__all__ = ["report", "run"]
