"""A Llama, fine-tuned on instructions by FSDP: ours, or torch's fully_shard.

config.py has the options, training.py the run, tuner.py the training loop, report.py the text.
"""

from ranklab.projects.fsdp.report import report
from ranklab.projects.fsdp.training import run

__all__ = ["report", "run"]
