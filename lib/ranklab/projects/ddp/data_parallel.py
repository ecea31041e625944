"""nn.DataParallel, what came before DDP: one process, one Python, all GPUs as threads.

At each step it copies the model to every GPU, scatters the batch from the first GPU, gathers the
outputs there, and computes the loss there; one interpreter lock serves all its threads. Hence DDP.
"""

from dataclasses import replace

import torch
from torch import nn

from ranklab.engine import launch
from ranklab.projects.ddp.data import open_data
from ranklab.projects.ddp.strong_and_weak import ROUNDS, enough_steps, seconds_per_step
from ranklab.projects.ddp.trainer import ImageTrainer

ONE_DEVICE = ("nn.DataParallel needs 2 GPUs or more to be compared with DDP, and sees {}: without "
              "a second one it calls the model as it is, so there is nothing to measure.")


def data_parallel_seconds(config, gpus, steps):
    """Seconds per step of nn.DataParallel over that many GPUs: one rank, with the batch of all."""
    def in_one_process(model, *_):
        return nn.DataParallel(model, list(range(gpus)))

    trainer = ImageTrainer(config, *open_data(config), wrap=in_one_process)
    return best_seconds(trainer, steps)


def ddp_seconds(config, steps):
    """Seconds per step of DDP, on this rank."""
    return best_seconds(ImageTrainer(config, *open_data(config)), steps)


def best_seconds(trainer, steps):
    return min(seconds_per_step(trainer, steps) for _ in range(ROUNDS))


def compare(config, timeout=600):
    """The times of both on all GPUs of this machine, as text; one sentence where there are not two.
    The same images per step; only the way to share them differs.
    """
    gpus = torch.cuda.device_count()  # asks the driver's library; opens no GPU
    if gpus < 2:
        return ONE_DEVICE.format(gpus)
    steps, config = enough_steps(config), replace(config, epochs=1, compile=False)
    whole = replace(config, batch_per_rank=gpus * config.batch_per_rank)
    one_process = launch(data_parallel_seconds, whole, gpus, steps, ranks=1, timeout=timeout)[0]
    per_rank = max(launch(ddp_seconds, config, steps, ranks=gpus, timeout=timeout))
    images = whole.batch_per_rank
    return "\n".join([
        f"{gpus} GPUs, {images} images a step",
        *(f"{name:16}{images / seconds:10,.0f} images/s{1e3 * seconds:10.1f} ms/step"
          for name, seconds in (("nn.DataParallel", one_process), ("DDP", per_rank))),
        f"DDP is {one_process / per_rank:.2f} times as fast",
    ])
