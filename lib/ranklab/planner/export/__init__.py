"""A Plan as a file that its tool reads, with sentences on what the tool lacks or does differently.

    megatron.py  options of Megatron-LM
    others.py    configs of torchtitan and DeepSpeed
    nodes.py     the processes of each node, for torchrun
    hybrid.py    the command of the course's own trainer, and a dry run of it; this one needs torch
"""

from ranklab.planner.export.megatron import megatron_arguments
from ranklab.planner.export.others import (
    deepspeed_differs, deepspeed_json, torchtitan_function, torchtitan_toml,
)

__all__ = [
    "deepspeed_differs", "deepspeed_json", "hybrid", "megatron_arguments", "torchtitan_function",
    "torchtitan_toml",
]
