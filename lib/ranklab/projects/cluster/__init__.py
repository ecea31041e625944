"""A job on a real Slurm loses a node and goes on; and links between hosts: slow, cut, flapping."""

from importlib.resources import files

from ranklab.projects.cluster.watched import watched_report, watched_run

__all__ = ["printed", "watched_report", "watched_run"]


def printed():
    """Return the output of `make slurm` on our machine; its first line gives the date."""
    return (files(__package__) / "printed.txt").read_text()
