"""A job on a real Slurm loses a node and goes on; and links between hosts: slow, cut, flapping."""

from ranklab.projects.cluster.links import try_links
from ranklab.projects.cluster.node_loss import lose_a_node

from ranklab.projects.cluster.watched import watched_report, watched_run

__all__ = ["lose_a_node", "try_links", "watched_report", "watched_run"]
