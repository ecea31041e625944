"""A BERT classifies texts, fine-tuned with Horovod's API."""

from ranklab.projects.horovod.training import accuracies, report, run

__all__ = ["accuracies", "report", "run"]
