"""ResNet-50 with torch's DDP, from a laptop to several nodes."""

from ranklab.projects.ddp.training import profile, report, run, said, scaling

__all__ = ["profile", "report", "run", "said", "scaling"]
