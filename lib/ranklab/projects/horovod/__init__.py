"""A BERT classifies texts with Horovod's API. Read training.py, bert.py, timeline.py."""

from ranklab.projects.horovod.training import Config, report, run

__all__ = ["Config", "report", "run", "timeline"]
