"""A GPT trained with ZeRO, ours or DeepSpeed's: what each stage holds, sends and gains.

    python -m ranklab.projects.zero                            all stages, ours, laptop size
    python -m ranklab.projects.zero --engine deepspeed --stage 1,2,3 --ranks 2
    python -m ranklab.projects.zero --size 1.3b --gpus 4 --gpu-gb 24 --write-config ds.json
    torchrun --nproc-per-node 4 -m ranklab.projects.zero --size 1.3b --config ds.json \\
        --engine deepspeed --checkpoint build/zero
    deepspeed --hostfile hosts --module ranklab.projects.zero ...    the same, without torchrun

--config takes stage, offload, batch, precision, clipping and AdamW's options from a DeepSpeed
config, for either engine; --write-config writes one for --gpus of --gpu-gb, and trains nothing.
--size 1.3b is GPT-2 1.3B in bf16 with activation checkpointing. --compiled takes DeepSpeed's
FusedAdam, or its CPUAdam with --offload cpu. Our checkpoints can be resumed with any number of
ranks in any stage; DeepSpeed's only with the same.
"""

import os
import sys

from ranklab.projects.runner import Project, watched
from ranklab.projects.zero.config import Command
from ranklab.projects.zero.costs import report, write_config
from ranklab.projects.zero.training import run


def act(command, config):
    if "RANK" in os.environ and "LOCAL_SIZE" in os.environ:  # by the command `deepspeed`
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["LOCAL_SIZE"])  # torchrun's name
    if command.write_config:
        return write_config(command, config)
    return report(run(command.size, command.stages(), ranks=command.ranks, path=command.path,
                      resume=command.resume, **watched(), **vars(config)))


project = Project(__package__, __doc__, Command, act)

if __name__ == "__main__":
    sys.exit(project.main())
