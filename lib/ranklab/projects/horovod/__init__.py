"""A BERT classifies texts by Horovod's API. Read config.py, bert.py, training.py, timeline.py."""

from ranklab.projects.horovod.config import Config
from ranklab.projects.horovod.training import report, run

__all__ = ["Config", "report", "run"]
