"""A GPT trained with ZeRO: what each stage holds, sends and brings, by ours or by DeepSpeed.

    python -m ranklab.projects.zero                            all stages, ours, laptop size
    python -m ranklab.projects.zero --engine deepspeed --stage 1,2,3 --ranks 2
    python -m ranklab.projects.zero --stage 3 --offload cpu    or a folder on a local NVMe disk
    python -m ranklab.projects.zero --size 1.3b --gpus 4 --gpu-gb 24 --write-config ds.json
    torchrun --nproc-per-node 4 -m ranklab.projects.zero --size 1.3b --config ds.json \\
        --engine deepspeed --checkpoint build/zero
    deepspeed --hostfile hosts --module ranklab.projects.zero --size 1.3b --config ds.json \\
        --engine deepspeed --checkpoint build/zero

--config takes stage, offload, batch, precision, clipping and AdamW's options from a DeepSpeed
config, for either engine; --write-config writes one for --gpus of --gpu-gb, and trains nothing.
--size 1.3b is GPT-2 1.3B in bf16 with activation checkpointing. With 24 GB: --micro-batch 1 or 2;
PYTORCH_ALLOC_CONF=expandable_segments:True fights fragmentation. Our stage 3 begins with the whole
model on each GPU. --compiled takes DeepSpeed's FusedAdam, or its CPUAdam with --offload cpu.
A checkpoint of ours goes on with any number of ranks, in any stage; DeepSpeed's as it was.
"""

import os
import sys

from ranklab.projects.runner import Project, watched
from ranklab.projects.zero.config import Options
from ranklab.projects.zero.report import machine, report, write_config
from ranklab.projects.zero.training import run


def act(options, config):
    if "RANK" in os.environ and "LOCAL_SIZE" in os.environ:  # by the command `deepspeed`
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["LOCAL_SIZE"])  # torchrun's name
    if options.write_config:
        return write_config(options, config)
    found = run(options.size, options.stages(), ranks=options.ranks, path=options.path,
                resume=options.resume, **watched(), **vars(config))
    return "\n".join([report(found), machine(config, found["shape"], options)[0]])


project = Project(__package__, __doc__, Options, act)
main = project.main

if __name__ == "__main__":
    sys.exit(main())
