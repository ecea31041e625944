"""A round through the clinic: each program runs, is observed, and a diagnosis is made."""

from ranklab.projects.clinic.ward import observe, report, visit

__all__ = ["observe", "report", "visit"]
