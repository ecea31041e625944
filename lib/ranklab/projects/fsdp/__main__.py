"""A Llama fine-tuned on instructions by FSDP, ours or torch's; scored on held-out examples.

    python -m ranklab.projects.fsdp --ranks 2                  a tiny one, first taught plain text
    python -m ranklab.projects.fsdp --engine fsdp2             by torch's fully_shard
    python -m ranklab.projects.fsdp --size 7b --dry-run --gpus 4 --gpu-gb 24
    torchrun --nproc-per-node 4 -m ranklab.projects.fsdp --size 7b --model models/Llama-2-7b \\
        --data alpaca.json --checkpoint build/fsdp --save build/tuned

--model takes a folder with config.json, safetensors and a tokenizer; each rank reads its own rows
of it. --size says how to train: 7b means bf16, activation checkpointing and offload, for 24 GB.
--shard-ranks 4 with 8 GPUs: hybrid sharding, two copies. A checkpoint goes on with any number of
ranks and with either engine. What is saved, transformers' from_pretrained loads.
"""

import sys

from ranklab.projects.fsdp.config import Options
from ranklab.projects.fsdp.report import report
from ranklab.projects.fsdp.training import run
from ranklab.projects.runner import Project, watched


def act(options, config):
    if options.dry_run:
        from ranklab.projects.fsdp.dry_run import dry_run_report  # only here: it fakes GPUs

        return dry_run_report(options.size, options.gpus, options.gpu_gb, **vars(config))
    return report(run(options.size, options.ranks, options.resume, **watched(), **vars(config)))


project = Project(__package__, __doc__, Options, act)
main = project.main

if __name__ == "__main__":
    sys.exit(main())
