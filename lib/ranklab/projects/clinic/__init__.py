"""A round through the clinic: each program runs under observation and is diagnosed."""

from ranklab.projects.clinic.ward import observe, report, visit

__all__ = ["observe", "report", "visit"]
