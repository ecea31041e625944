"""A folder for PYTHONPATH: sitecustomize.py, by which the ranks of any launcher are observed."""

__all__ = []
