"""A GPT trained with ZeRO, ours or DeepSpeed's: what each stage holds, sends and gains."""

from ranklab.projects.zero.costs import report
from ranklab.projects.zero.training import run

__all__ = ["report", "run"]
