"""What a learner uses besides the library: check, hint, answer, progress, grade, drill, build."""

__all__ = ["diagnose"]
