"""A Plan as a file that its tool reads; sentences say what the tool lacks or does otherwise.

    megatron.py  options of Megatron-LM
    others.py    configs of torchtitan and DeepSpeed

The command of the course's own trainer is in planner/own.py.
"""

from ranklab.planner.export.megatron import megatron_arguments
from ranklab.planner.export.others import (
    deepspeed_differs, deepspeed_json, torchtitan_function, torchtitan_toml,
)
from ranklab.planner.own import own_command

__all__ = [
    "deepspeed_differs", "deepspeed_json", "megatron_arguments", "own_command",
    "torchtitan_function", "torchtitan_toml",
]
