"""A job on a real Slurm loses a node and goes on; and links between hosts: slow, cut, flapping."""
