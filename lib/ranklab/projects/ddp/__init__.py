"""ResNet-50 with torch's DDP, from a laptop to several nodes."""

from ranklab.projects.ddp.strong_and_weak import figure, scaling, scaling_report
from ranklab.projects.ddp.training import LAPTOP, profile, report, run

__all__ = ["LAPTOP", "figure", "profile", "report", "run", "scaling", "scaling_report"]
