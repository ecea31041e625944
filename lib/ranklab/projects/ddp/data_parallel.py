"""nn.DataParallel, what came before DDP: one process, one Python, all GPUs as threads.

At each step it copies the model to every GPU, scatters the batch from the first GPU, gathers the
outputs there, and computes the loss there; one interpreter lock serves all its threads. Hence DDP.
"""

from dataclasses import replace

import torch
from torch import nn

from ranklab.engine import launch
from ranklab.projects.ddp.strong_and_weak import ROUNDS, enough_steps, seconds_per_step
from ranklab.projects.ddp.trainer import ImageTrainer, wrap

ONE_DEVICE = ("nn.DataParallel needs 2 GPUs or more to be compared with DDP, and sees {}: without "
              "a second one it calls the model as it is, so there is nothing to measure.")


def in_one_process(model, *_):
    """nn.DataParallel over all GPUs."""
    return nn.DataParallel(model)


def best_seconds(config, wrap, steps):
    """Seconds per step on this rank."""
    trainer = ImageTrainer(config, wrap=wrap)
    return min(seconds_per_step(trainer, steps) for _ in range(ROUNDS))


def compare(config, timeout=600):
    """The times of both on all GPUs of this machine, as text; one sentence where there are not two.
    The same images per step; only the way to share them differs.
    """
    gpus = torch.cuda.device_count()  # asks the driver's library; opens no GPU
    if gpus < 2:
        return ONE_DEVICE.format(gpus)
    steps, config = enough_steps(config), replace(config, epochs=1, compile=False)
    images = gpus * config.batch_per_rank
    whole = replace(config, batch_per_rank=images)
    seconds = {name: max(launch(best_seconds, *given, steps, ranks=ranks, timeout=timeout))
               for name, ranks, given in (("nn.DataParallel", 1, (whole, in_one_process)),
                                          ("DDP", gpus, (config, wrap)))}
    lines = [f"{name:16}{images / each:10,.0f} images/s{1e3 * each:10.1f} ms/step"
             for name, each in seconds.items()]
    return "\n".join([f"{gpus} GPUs, {images} images a step", *lines, "DDP is "
                      f"{seconds['nn.DataParallel'] / seconds['DDP']:.2f} times as fast"])
