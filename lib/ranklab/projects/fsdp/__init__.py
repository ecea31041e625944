"""A Llama, fine-tuned on instructions by FSDP: ours, or torch's fully_shard."""

from ranklab.projects.fsdp.report import report
from ranklab.projects.fsdp.training import run

__all__ = ["report", "run"]
