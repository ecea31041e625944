"""Lab 12's training run under a chaos monkey: ranks die, hang and lose files, and it continues."""

from ranklab.projects.resilience.chaos import KINDS, Fault, plan_faults
from ranklab.projects.resilience.report import report
from ranklab.projects.resilience.soak import Config, soak, trial
from ranklab.projects.resilience.survive import survive

__all__ = ["KINDS", "Config", "Fault", "plan_faults", "report", "soak", "survive", "trial"]
