"""The interview bank: questions as YAML, answers computed by the library's own functions."""

__all__ = []
