"""A job on a real Slurm loses a node and goes on; and links between hosts: slow, cut, flapping."""

from ranklab.projects.cluster.watched import watched_report, watched_run

__all__ = ["watched_report", "watched_run"]
