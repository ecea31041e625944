"""The exercise checks: one module for each lab."""

__all__ = []
