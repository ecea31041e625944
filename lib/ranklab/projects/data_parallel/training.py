"""A CNN trained by data parallelism, any piece of which can be left out. Read ClassTrainer."""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ranklab.data import digits, find_images
from ranklab.data_parallel import (
    OverlappedDataParallel, convert_sync_batch_norm, replicas_agree, scale_learning_rate,
    shard_sampler,
)
from ranklab.data_parallel.training import DataParallel
from ranklab.engine import device, launch
from ranklab.models.cnn import CNN, CNNConfig
from ranklab.projects.authors import by_learner
from ranklab.projects.command import ranks_to_come
from ranklab.trainer import LoopConfig, Schedule, Trainer
from ranklab.trainer import learning_rate as cosine_rate


class Functions(NamedTuple):
    """The functions that make up a run: the library's, or a learner's."""

    replica: Callable = OverlappedDataParallel  # averages the gradients in backward
    sampler: Callable = shard_sampler
    scale: Callable = scale_learning_rate
    agree: Callable = replicas_agree


@dataclass(frozen=True)
class Run:
    """One training run, seen from all its ranks."""

    accuracy: float  # of rank 0's replica on the held-out images: the one that is saved
    worst: float  # of the worst replica
    spread: float  # the largest difference between two replicas in a weight or statistic
    agree: list  # for each epoch: all replicas have the same weights, bit for bit
    loss: list  # for each epoch: the mean over all its images
    seconds: list  # for each epoch: of the slowest rank
    own: list  # the names of Functions that were a learner's


def run(configs, ranks=None, seeds=(0,), progress=False, timeout=600, **functions):
    """Return {name: one Run for each seed} for {name: Config}; all have the same data.

    On fresh ranks, in one launch; under torchrun or srun on the job's ranks.
    functions  a learner's functions for Functions: replica=..., sampler=...
    """
    functions, first = Functions(**functions), next(iter(configs.values()))
    for config in configs.values():
        refuse_ranks(config, ranks_to_come(ranks))
    # scikit-learn takes a second to import: once here, not on every rank
    images = digits() if first.data == "digits" else None
    jobs = [(config, seed) for config in configs.values() for seed in seeds]
    by_rank = launch(_train_jobs, jobs, images, functions, progress, ranks=ranks, timeout=timeout,
                     stream=progress)
    runs = [_whole(of_ranks, by_learner(functions._asdict())) for of_ranks in zip(*by_rank)]
    return {name: runs[i * len(seeds) : (i + 1) * len(seeds)] for i, name in enumerate(configs)}


def refuse_ranks(config, ranks):
    """Raise ValueError if the ranks can't share the images of a step evenly."""
    if config.batch % ranks:
        raise ValueError(f"{ranks} ranks must divide the batch of {config.batch} images")


def _train_jobs(jobs, images, functions, progress):
    """Run each of the jobs; return what each training run measured on this rank."""
    images, results = images or find_images(jobs[0][0].data, jobs[0][0].folder), []
    # all on the device: a few hundred megabytes at most, and no loader to wait for
    images = dataclasses.replace(images, **{
        name: getattr(images, name).to(device())
        for name in ("train", "train_labels", "held_out", "held_out_labels")})
    for config, seed in jobs:
        trainer = ClassTrainer(config, images, seed, functions, progress)
        trainer.fit()
        results.append(trainer.by_epoch | {"accuracy": accuracy(trainer.forward, images),
                                           "spread": spread(trainer.model)})
    return results


def _whole(of_ranks, own):
    """Combine each rank's measurements of a training run into one Run."""
    first = of_ranks[0]
    loss, seconds = (zip(*(one[name] for one in of_ranks)) for name in ("loss", "seconds"))
    return Run(first["accuracy"], min(one["accuracy"] for one in of_ranks), first["spread"],
               first["agree"], [sum(each) / len(each) for each in loss],
               [max(each) for each in seconds], own)


class ClassTrainer(Trainer):
    """The course's training loop for a CNN, fed with images stored on the device."""

    unit = "images"

    def __init__(self, config, images, seed, functions=Functions(), progress=False):
        self.config, self.images, self.seed, self.functions = config, images, seed, functions
        R = dist.get_world_size()
        self.title = f"ranks {R}, seed {seed}"
        self.units_per_step, self.batch_per_rank = config.batch, config.batch // R
        self.images_per_epoch = math.ceil(len(images.train) / R)  # of each rank
        self.steps_per_epoch = math.ceil(self.images_per_epoch / self.batch_per_rank)
        self.by_epoch = {"seconds": [], "loss": [], "agree": []}
        loop = LoopConfig(self.batch_per_rank, config.weight_decay, 0.0, config.precision,
                          self.steps_per_epoch, self.steps_per_epoch)
        schedule = Schedule(config.lr, 0, config.epochs * self.steps_per_epoch)
        torch.manual_seed(1000 * seed + dist.get_rank())  # the broadcast makes ranks equal
        super().__init__(make_model(config, images), loop, schedule,
                         partial(torch.optim.SGD, lr=config.lr, momentum=config.momentum),
                         device(), parallel=WithPieces(config, functions.replica),
                         progress=progress)

    def rate(self):
        """Return the learning rate: scaled to the batch, warm-up, then half a cosine to zero."""
        config, warmup = self.config, self.config.warmup * self.steps_per_epoch
        scale = partial(self.functions.scale, config.lr, config.batch, config.base_batch)
        if self.steps_done < warmup:
            return scale(self.steps_done, warmup)
        return cosine_rate(Schedule(scale(), warmup, self.schedule.steps), self.steps_done)

    def next_batch(self):
        epoch, number = divmod(self.steps_done, self.steps_per_epoch)
        if number == 0:
            rank = 0 if "shard" in self.config.without else dist.get_rank()
            epoch = 0 if "epoch" in self.config.without else epoch
            rows = self.functions.sampler(len(self.images.train), rank, dist.get_world_size(),
                                          epoch, self.seed)
            self.rows = torch.tensor(rows, device=device()).split(self.batch_per_rank)
            self.start, self.lost = time.perf_counter(), 0.0
        rows = self.rows[number]
        return self.images.train[rows], self.images.train_labels[rows]

    def to_device(self, x):
        return x  # all images are there

    def loss_sum(self, x, labels):  # (B/R, C, H, W), (B/R,)
        with self.autocast():
            logits = self.forward(x)
        loss = F.cross_entropy(logits.float(), labels, reduction="sum")  # (B/R, K)
        self.lost += loss.detach()
        return loss

    def evaluate(self):
        """Add the epoch to `by_epoch`; return whether all replicas agree."""
        loss = float(self.lost) / self.images_per_epoch  # waits for the device
        seconds, agree = time.perf_counter() - self.start, self.functions.agree(self.model)
        for name, number in (("loss", loss), ("seconds", seconds), ("agree", agree)):
            self.by_epoch[name].append(number)
        return agree


class WithPieces(DataParallel):
    """Data parallelism without the pieces that config.without names."""

    def __init__(self, config, replica):
        super().__init__(wrap=replica, equal_parts=True)
        self.config = config
        if "mean" in config.without:
            self.gradient_scale *= self.ranks  # a sum, where averaging divides by R

    def apply(self, model):
        without = self.config.without
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        replica = super().apply(model)
        if "broadcast" in without:
            model.load_state_dict(weights)
        if "average" in without:
            replica.sync = False  # as if every step were inside no_sync(): so buffers stay as well
        if "buffers" in without:
            replica.sync_buffers = lambda: None
        return replica


def make_model(config, images):
    _, channels, side, _ = images.train.shape
    norm = {"sync": "batch", "none": None}.get(config.norm, config.norm)
    model = CNN(CNNConfig(channels, side, images.classes, config.width, norm)).to(device())
    return convert_sync_batch_norm(model) if config.norm == "sync" else model


@torch.no_grad()
def accuracy(replica, images):
    """Return the fraction of held-out images that this rank's replica gets right."""
    replica.eval()
    right = sum((replica(x).argmax(1) == y).sum().item() for x, y in
                zip(images.held_out.split(1000), images.held_out_labels.split(1000)))
    return right / len(images.held_out)


@torch.no_grad()
def spread(model):
    """Return the largest difference between two ranks in a weight or statistic."""
    most = torch.cat([t.flatten().float() for t in (*model.parameters(), *model.buffers())])
    least = most.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return (most - least).max().item()
