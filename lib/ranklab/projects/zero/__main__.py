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

import dataclasses
import json
import os
import sys
from pathlib import Path

from ranklab.options import comma_list, existing_file, new_file
from ranklab.projects.command import Command, refusals, say, time_limit
from ranklab.projects.zero.config import MODELS, SIZES, Settings, settings_of
from ranklab.projects.zero.report import machine, report
from ranklab.projects.zero.training import run

STAGES = (0, 1, 2, 3)


def parse(argv=None):
    """(the options, the Settings)."""
    command = Command(__package__, __doc__)
    command.add_argument("--size", choices=SIZES, default="laptop", help="of the GPT")
    command.add_argument("--stage", type=comma_list(int, STAGES),
                         help="0, 1, 2 or 3, or some of them with commas (all)")
    command.add_ranks()
    command.add_resume()
    command.add_data()
    command.add_argument("--config", metavar="FILE", type=existing_file, help="a DeepSpeed config")
    command.add_machine()
    command.add_argument("--write-config", metavar="FILE", type=new_file,
                         help="for that machine, and end")
    command.add_argument("--local_rank", type=int, help="given by the command deepspeed")
    command.add_fields(Settings, without=["betas"])
    options = command.parse(argv)
    settings = SIZES[options.size]
    if options.config:
        settings = read_config(command, options, settings)
    options.stage = options.stage or STAGES
    if options.checkpoint and len(options.stage) > 1:
        command.error("--checkpoint keeps one stage: name it with --stage")
    if options.offload and 0 in options.stage:
        command.error("--offload needs stage 1, 2 or 3: name them with --stage")
    return options, command.config(settings, options)


def read_config(command, options, settings):
    """`settings` as the DeepSpeed config says; what the command line says comes on top."""
    with refusals(command.prog):
        stage, given = settings_of(options.config)
    options.stage = options.stage or [stage]
    return dataclasses.replace(settings, **{"engine": options.engine or settings.engine, **given})


@refusals(__package__)
def main(argv=None):
    if "RANK" in os.environ and "LOCAL_SIZE" in os.environ:
        # what the command `deepspeed` calls LOCAL_SIZE has torchrun's name, too
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["LOCAL_SIZE"])
    options, settings = parse(argv)
    if options.write_config:
        text, config = machine(settings, MODELS[options.size], options.gpus, options.gpu_gb)
        Path(options.write_config).write_text(json.dumps(config, indent=2) + "\n")
        say(f"{text}\n{options.write_config} says so to DeepSpeed.")
        return 0
    found = run(options.size, tuple(options.stage), ranks=options.ranks, path=options.data,
                resume=options.resume, progress=sys.stderr.isatty(), timeout=time_limit(),
                **vars(settings))
    say(report(found), machine(settings, found["shape"], options.gpus, options.gpu_gb)[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
