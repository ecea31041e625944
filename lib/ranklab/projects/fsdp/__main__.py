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

import dataclasses
import sys

from ranklab.engine.in_place import is_started_by_another
from ranklab.projects.command import Command, say
from ranklab.projects.fsdp.config import SIZES, Settings
from ranklab.projects.fsdp.report import report
from ranklab.projects.fsdp.training import LAUNCH_LIMIT, run

COLLECTIVE_LIMIT = 600  # seconds, under torchrun and srun: a dead rank is noticed after it


def parse(argv=None):
    """(the options, the Settings)."""
    command = Command(__package__, __doc__)
    command.add_argument("--size", choices=SIZES, default="laptop")
    command.add_ranks()
    command.add_resume()
    command.add_argument("--dry-run", action="store_true", help="count the memory, train nothing")
    command.add_argument("--gpus", type=int, default=4, help="of the machine for --dry-run")
    command.add_argument("--gpu-gb", type=float, default=24, help="memory of each")
    command.add_fields(Settings, *(field.name for field in dataclasses.fields(Settings)
                                   if field.name != "betas"))
    options = command.parse(argv)
    if options.ranks and is_started_by_another():
        command.error("--ranks is for python alone: the job has its ranks already")
    return options, command.config(SIZES[options.size], options)


def main(argv=None):
    options, settings = parse(argv)
    changes = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    if options.dry_run:
        from ranklab.projects.fsdp.dry_run import dry_run_report  # only here: it fakes GPUs

        say(dry_run_report(options.size, options.gpus, options.gpu_gb, **changes))
        return 0
    limit = COLLECTIVE_LIMIT if is_started_by_another() else LAUNCH_LIMIT
    say(report(run(options.size, options.ranks, resume=options.resume, timeout=limit,
                   progress=sys.stderr.isatty(), **changes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
