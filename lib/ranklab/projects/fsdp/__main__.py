"""A Llama fine-tuned on instructions with FSDP, ours or torch's; scored on held-out examples.

    python -m ranklab.projects.fsdp --ranks 2                  a tiny one, first taught plain text
    python -m ranklab.projects.fsdp --engine fsdp2             by torch's fully_shard
    torchrun --nproc-per-node 4 -m ranklab.projects.fsdp --size 7b --model models/Llama-2-7b \\
        --data alpaca.json --checkpoint build/fsdp --save build/tuned

--model takes a folder with config.json, safetensors and a tokenizer. --size 7b means bf16,
activation checkpointing and offload, for GPUs of 24 GB. --shard-ranks 4 with 8 GPUs is hybrid
sharding, two copies. A checkpoint can be resumed with any number of ranks and either engine.
"""

import sys

from ranklab.projects.fsdp.training import Options, report, run
from ranklab.projects.runner import Project, run_and_report

project = Project(__package__, __doc__, Options, run_and_report(run, report))

if __name__ == "__main__":
    sys.exit(project.main())
