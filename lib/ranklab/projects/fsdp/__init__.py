"""A Llama, fine-tuned on instructions with FSDP: ours, or torch's fully_shard."""

from ranklab.projects.fsdp.training import LLAMAS, report, run

__all__ = ["LLAMAS", "report", "run"]
