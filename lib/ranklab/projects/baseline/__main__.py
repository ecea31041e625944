"""The baseline that every later lab is compared with: a GPT on real text, on one device.

    python -m ranklab.projects.baseline                       laptop size, under half a minute
    python -m ranklab.projects.baseline --size 350m --device cuda --compile
    python -m ranklab.projects.baseline --size 1.5b --device cuda --compile --steps 200

On a GPU: bf16, fused AdamW, flash attention through SDPA, a vocabulary padded to a multiple of 128.
The micro-batches suit 80 GB; with less, or when memory runs out: --micro-batch 4, then --recompute,
then --loss-chunks 8; PYTORCH_ALLOC_CONF=expandable_segments:True fights fragmentation.
"""

import argparse
import os
import sys

import torch

from ranklab.projects.baseline import report, run
from ranklab.projects.baseline.training import MODELS, TRAINING, precision_on
from ranklab.options import number, positive
from ranklab.projects.command import Command, refusals
from ranklab.trainer import PRECISIONS


def parse(argv=None):
    """(the options, the TrainConfig)."""
    command = Command(__package__, __doc__)
    command.add_argument("--size", choices=MODELS, default="laptop", help="of the GPT")
    command.add_argument("--device", type=device, default="cpu", help="cpu, cuda, cuda:1")
    command.add_argument("--compile", action="store_true", help="torch.compile the model")
    command.add_argument("--recompute", action="store_true", help="checkpoint each block")
    command.add_argument("--loss-chunks", type=positive, default=1, help="logits in so many parts")
    command.add_data()
    command.add_resume()
    command.add_argument("--threads", type=number(least=1, most=1024), default=1,
                         help="of the CPU; more for large models")
    command.add_fields(TRAINING["laptop"], "steps", "batch", "micro_batch", "lr", "eval_batch",
                       "log_every", "checkpoint", "checkpoint_every", "seed")
    command.add_argument("--precision", choices=PRECISIONS, help="fp32 on a CPU, bf16 on a GPU")
    options = command.parse(argv)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        command.error(f"WORLD_SIZE={os.environ['WORLD_SIZE']}: this is the baseline of one device; "
                      "lab 03 trains on many")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        command.error(f"--device {options.device}: this torch ({torch.__version__}) sees no GPU")
    options.precision = options.precision or precision_on(options.device)
    return options, command.config(TRAINING[options.size], options)


def device(text):
    """A type: the name of a device that torch knows."""
    try:
        return str(torch.device(text))
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device: cpu, cuda or cuda:1") from None


@refusals(__package__)
def main(argv=None):
    options, config = parse(argv)
    torch.set_num_threads(options.threads)  # a second thread slows small matrices down
    if config.precision != "fp32":
        torch.set_float32_matmul_precision("high")  # TF32, where autocast leaves float32 on a GPU
    found = run(options.size, options.device, options.compile, options.recompute,
                options.loss_chunks, options.data, options.resume, **vars(config))
    print(report(found))
    if found["sample"]:
        print(f"\na sample:\n{found['sample']}")
    if found["held_out"] >= found["bigram"]:
        print("It has not beaten the bigram model yet: give it more --steps.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
