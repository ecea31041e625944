"""A folder for PYTHONPATH: its sitecustomize.py observes the ranks of any launcher."""

__all__ = []
