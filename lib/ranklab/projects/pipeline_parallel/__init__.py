"""A GPT trained through a pipeline, and a monitor of its bubble."""

from ranklab.projects.pipeline_parallel.training import report, run

__all__ = ["peers", "report", "run"]
