"""A BERT classifies texts, fine-tuned with Horovod's API."""

from ranklab.projects.horovod.config import Config
from ranklab.projects.horovod.training import accuracies, report, run

__all__ = ["Config", "accuracies", "report", "run"]
