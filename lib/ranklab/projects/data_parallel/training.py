"""A CNN trained by data parallelism, from which single pieces can be left out. Read `train`."""

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
from torch.nn.parallel import DistributedDataParallel

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
    """What a run is made of; a learner's own will do."""

    replica: Callable = OverlappedDataParallel  # averages the gradients in backward
    sampler: Callable = shard_sampler
    scale: Callable = scale_learning_rate
    agree: Callable = replicas_agree


@dataclass(frozen=True)
class Run:
    """One training run, seen from all its ranks."""

    ranks: int
    seed: int
    accuracy: float  # of rank 0's replica on the held-out images: the one that is saved
    worst: float  # of the worst replica
    spread: float  # the largest difference between two replicas in a weight or statistic
    agree: list  # for each epoch: all replicas have the same weights, bit for bit
    loss: list  # for each epoch: the mean over all its images
    seconds: list  # for each epoch: of the slowest rank
    images: int  # in an epoch, on all ranks
    own: tuple = ()  # the names of Functions that were a learner's


def run(configs, ranks=None, seeds=(0,), progress=False, timeout=600, **functions):
    """{name: one Run for each seed} for {name: Config}, which differ in anything but data.

    On fresh ranks, in one launch; under torchrun or srun on those that are there.
    functions  a learner's own of Functions: replica=..., sampler=...
    """
    functions, first = Functions(**functions), next(iter(configs.values()))
    for config in configs.values():
        refuse_ranks(config, ranks_to_come(ranks))
    # scikit-learn takes a second to import: once here, not on every rank
    images = digits() if first.data == "digits" else None
    jobs = [(config, seed) for config in configs.values() for seed in seeds]
    seen = launch(_train_jobs, jobs, images, functions, progress, ranks=ranks, timeout=timeout,
                  stream=progress)  # fmt: skip
    runs = [_whole(*job, of_ranks, functions) for job, of_ranks in zip(jobs, zip(*seen))]
    return {name: runs[i * len(seeds) : (i + 1) * len(seeds)] for i, name in enumerate(configs)}


def refuse_ranks(config, ranks):
    """Raises ValueError where the ranks can't have as many images of a step each."""
    if config.batch % ranks:
        raise ValueError(f"{ranks} ranks must divide the batch of {config.batch} images")


def _train_jobs(jobs, images, functions, progress):
    images = images or find_images(jobs[0][0].data, jobs[0][0].folder)
    # all on the device: a few hundred megabytes at most, and no loader to wait for
    images = dataclasses.replace(images, **{
        name: getattr(images, name).to(device())
        for name in ("train", "train_labels", "held_out", "held_out_labels")
    })  # fmt: skip
    return [train(config, images, seed, functions, progress) for config, seed in jobs]


def _whole(config, seed, of_ranks, functions):
    """One Run of what `train` returned on each rank."""
    first, used = of_ranks[0], functions._asdict()
    if config.engine == "torch":
        del used["replica"]
    loss, seconds = (zip(*(one[name] for one in of_ranks)) for name in ("loss", "seconds"))
    return Run(len(of_ranks), seed, first["accuracy"], min(one["accuracy"] for one in of_ranks),
               first["spread"], first["agree"], [sum(each) / len(each) for each in loss],
               [max(each) for each in seconds], first["images"], tuple(by_learner(used)))


def train(config, images, seed, functions=Functions(), progress=False):
    """A CNN is trained by all ranks together; returns what this rank saw, in a dict."""
    trainer = ClassTrainer(config, images, seed, functions, progress)
    trainer.fit()
    return {**trainer.seen, "accuracy": accuracy(trainer.forward, images),
            "spread": spread(trainer.model), "images": trainer.ranks * trainer.images_per_epoch}


class ClassTrainer(Trainer):
    """The course's training loop, fed with images that lie on the device, for a CNN."""

    unit = "images"

    def __init__(self, config, images, seed, functions=Functions(), progress=False):
        self.config, self.images, self.seed, self.functions = config, images, seed, functions
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.title = f"ranks {self.ranks}, seed {seed}"
        refuse_ranks(config, self.ranks)
        self.units_per_step, self.batch_per_rank = config.batch, config.batch // self.ranks
        self.images_per_epoch = math.ceil(len(images.train) / self.ranks)  # of each rank
        self.steps_per_epoch = math.ceil(self.images_per_epoch / self.batch_per_rank)
        self.seen = {"seconds": [], "loss": [], "agree": []}  # a number for each epoch
        loop = LoopConfig(self.batch_per_rank, config.weight_decay, 0.0, config.precision,
                          self.steps_per_epoch, self.steps_per_epoch)  # fmt: skip
        schedule = Schedule(config.lr, 0, config.epochs * self.steps_per_epoch)
        torch.manual_seed(1000 * seed + self.rank)  # it is the broadcast that makes ranks equal
        super().__init__(make_model(config, images), loop, schedule,
                         partial(torch.optim.SGD, lr=config.lr, momentum=config.momentum),
                         device(), parallel=WithPieces(config, functions.replica),
                         progress=progress)  # fmt: skip

    def rate(self):
        return learning_rate(self.config, self.steps_done, self.steps_per_epoch,
                             self.functions.scale)

    def next_batch(self):
        epoch, place = divmod(self.steps_done, self.steps_per_epoch)
        if place == 0:
            without = self.config.without
            mine = self.functions.sampler(
                len(self.images.train), 0 if "shard" in without else self.rank, self.ranks,
                0 if "epoch" in without else epoch, self.seed)
            self.rows = torch.tensor(mine, device=device()).split(self.batch_per_rank)
            self.start, self.lost = time.perf_counter(), 0.0
        rows = self.rows[place]
        return self.images.train[rows], self.images.train_labels[rows]

    def to_device(self, x):
        return x  # all images are there

    def loss_sum(self, x, labels):  # (B/R, C, H, W), (B/R,)
        with self.autocast():
            logits = self.forward(shifted_and_mirrored(x) if self.config.augment else x)
        loss = F.cross_entropy(logits.float(), labels, reduction="sum")  # (B/R, K)
        self.lost += loss.detach()
        return loss

    def evaluate(self):
        """The epoch is in `seen`; whether all replicas agree."""
        self.seen["loss"].append(float(self.lost) / self.images_per_epoch)  # waits for the device
        self.seen["seconds"].append(time.perf_counter() - self.start)
        self.seen["agree"].append(self.functions.agree(self.model))
        return self.seen["agree"][-1]

    def shown(self):
        return {"loss": f"{self.history.loss[-1]:.3f}", "agree": str(self.seen["agree"][-1:])}


class WithPieces(DataParallel):
    """Data parallelism by ours or torch's engine, without what config.without names."""

    def __init__(self, config, replica):
        wrap = torch_ddp if config.engine == "torch" else replica
        super().__init__(wrap=wrap, equal_parts=True)
        self.config = config
        if "mean" in config.without:
            self.gradient_scale *= self.ranks  # a sum, where averaging divides by R

    def apply(self, model):
        without = self.config.without
        own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        replica = super().apply(model)
        if "broadcast" in without:
            model.load_state_dict(own)
        if "average" in without:
            replica.sync = False  # as if every step were inside no_sync(): so buffers stay, too
        if "buffers" in without:
            replica.sync_buffers = lambda: None
        return replica


def torch_ddp(model, group):
    return DistributedDataParallel(model, process_group=group)


def make_model(config, images):
    _, channels, side, _ = images.train.shape
    norm = {"sync": "batch", "none": None}.get(config.norm, config.norm)
    model = CNN(CNNConfig(channels, side, images.classes, config.width, norm))
    model = model.to(device())
    return convert_sync_batch_norm(model) if config.norm == "sync" else model


def learning_rate(config, step, steps, scale=scale_learning_rate):
    """Scaled to the batch, with warm-up; after it half a cosine down to zero."""
    warmup = 0 if "warmup" in config.without else config.warmup * steps
    batch = config.base_batch if "scaling" in config.without else config.batch
    if step < warmup:
        return scale(config.lr, batch, config.base_batch, step, warmup)
    peak = scale(config.lr, batch, config.base_batch)
    return cosine_rate(Schedule(peak, warmup, config.epochs * steps), step)


def shifted_and_mirrored(x, most=4):
    """Each image moved by up to `most` pixels either way, and half of them mirrored."""
    B, _, H, W = x.shape
    start = torch.randint(2 * most + 1, (2, B, 1), device=x.device)
    rows, columns = (s + torch.arange(n, device=x.device) for s, n in zip(start, (H, W)))  # (B, H)
    columns = torch.where(torch.rand(B, 1, device=x.device) < 0.5, columns, columns.flip(1))
    padded = F.pad(x, (most,) * 4).permute(0, 2, 3, 1)  # (B, H + 8, W + 8, C)
    image = torch.arange(B, device=x.device)[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@torch.no_grad()
def accuracy(replica, images):
    """The fraction of held-out images that this rank's replica gets right."""
    replica.eval()
    right = sum((replica(x).argmax(1) == y).sum().item() for x, y in
                zip(images.held_out.split(1000), images.held_out_labels.split(1000)))  # fmt: skip
    replica.train()
    return right / len(images.held_out)


@torch.no_grad()
def spread(model):
    """The largest difference between two ranks in a weight or statistic of `model`."""
    most = torch.cat([t.flatten().float() for t in (*model.parameters(), *model.buffers())])
    least = most.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return (most - least).max().item()
