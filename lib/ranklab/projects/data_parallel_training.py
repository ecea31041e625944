"""A CNN trained by data parallelism, from which single pieces can be left out. Read `train`."""

import contextlib
import dataclasses
import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from ranklab.data import digits, find_images
from ranklab.data_parallel import (
    OverlappedDataParallel, convert_sync_batch_norm, replicas_agree, scale_learning_rate,
    shard_sampler,
)
from ranklab.engine import device, launch
from ranklab.models.cnn import CNN, CNNConfig

# What a run can leave out, and what is wrong then.
PIECES = {
    "broadcast": "every rank starts from its own weights",
    "average": "every rank steps along its own gradient, and keeps its own statistics",
    "mean": "gradients are summed, not averaged",
    "shard": "every rank takes rank 0's images",
    "epoch": "every epoch has the same order",
    "buffers": "every rank keeps its own batch-norm statistics",
    "scaling": "the learning rate is that of the small batch",
    "warmup": "the large learning rate comes at once",
}


@dataclass(frozen=True)
class Settings:
    """How to train; checked when it is made. The defaults suit the digits."""

    data: str = "digits"
    folder: str | None = None
    epochs: int = 3
    batch: int = 64  # images in a step, over all ranks
    lr: float = 0.12  # right for base_batch
    base_batch: int = 16
    warmup: int = 1  # epochs
    momentum: float = 0.0
    weight_decay: float = 0.0
    width: int = 8
    norm: str | None = "batch"  # "sync": batch norm over all ranks
    augment: bool = False  # images shifted and mirrored
    precision: str = "fp32"  # "bf16": by autocast
    engine: str = "ours"  # "torch": torch's own DistributedDataParallel
    without: tuple[str, ...] = ()  # of PIECES

    def __post_init__(self):
        choices = {"engine": ("ours", "torch"), "precision": ("fp32", "bf16"),
                   "norm": ("batch", "sync", "group", None)}  # fmt: skip
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {known}")
        for name in ("epochs", "batch", "base_batch", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if unknown := set(self.without) - set(PIECES):
            raise ValueError(f"without={min(unknown)!r}: the pieces are {', '.join(PIECES)}")
        if self.engine == "torch" and set(self.without) & {"broadcast", "average", "buffers"}:
            raise ValueError(f"torch's own engine cannot leave out {', '.join(self.without)}")


TRAINING = {
    "digits": Settings(),
    "mnist": Settings("mnist", epochs=5, batch=512, lr=0.05, base_batch=128, momentum=0.9,
                      width=16),
    "cifar10": Settings("cifar10", epochs=30, batch=512, lr=0.05, base_batch=128, warmup=5,
                        momentum=0.9, weight_decay=5e-4, width=64, augment=True),
}  # fmt: skip


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


def run(settings, ranks=None, seeds=(0,), progress=False, timeout=600):
    """One Run for each seed, on fresh ranks (under torchrun or srun: on those that are there)."""
    return run_all([settings], ranks, seeds, progress, timeout)[0]


def run_all(many, ranks=None, seeds=(0,), progress=False, timeout=600):
    """For each of `many` Settings, which differ in anything but data: one Run for each seed."""
    # scikit-learn takes a second to import: once here, not on every rank
    images = digits() if many[0].data == "digits" else None
    jobs = [(settings, seed) for settings in many for seed in seeds]
    seen = launch(_train_jobs, jobs, images, progress, ranks=ranks, timeout=timeout,
                  stream=progress)  # fmt: skip
    runs = [_whole(seed, of_ranks) for (_, seed), of_ranks in zip(jobs, zip(*seen))]
    return [runs[i : i + len(seeds)] for i in range(0, len(runs), len(seeds))]


def _train_jobs(jobs, images, progress):
    images = images or find_images(jobs[0][0].data, jobs[0][0].folder)
    # all on the device: a few hundred megabytes at most, and no loader to wait for
    images = dataclasses.replace(images, **{
        name: getattr(images, name).to(device())
        for name in ("train", "train_labels", "held_out", "held_out_labels")
    })  # fmt: skip
    return [train(settings, images, seed, progress) for settings, seed in jobs]


def _whole(seed, of_ranks):
    """One Run of what `train` returned on each rank."""
    first = of_ranks[0]
    loss, seconds = ([one[name] for one in of_ranks] for name in ("loss", "seconds"))
    return Run(len(of_ranks), seed, first["accuracy"], min(one["accuracy"] for one in of_ranks),
               first["spread"], first["agree"], [sum(each) / len(each) for each in zip(*loss)],
               [max(each) for each in zip(*seconds)], first["images"])  # fmt: skip


def train(settings, images, seed, progress=False):
    """A CNN is trained by all ranks together; returns what this rank saw, in a dict."""
    rank, R = dist.get_rank(), dist.get_world_size()
    if settings.batch % R:
        raise ValueError(f"{R} ranks must divide the batch of {settings.batch} images")
    n, without = len(images.train), settings.without
    torch.manual_seed(1000 * seed + rank)  # ranks differ: it is the broadcast that makes them equal
    model = make_model(settings, images)
    replica = replicate(model, settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum,
                                weight_decay=settings.weight_decay)  # fmt: skip
    steps = math.ceil(math.ceil(n / R) * R / settings.batch)  # in an epoch
    seen = {"seconds": [], "loss": [], "agree": []}
    bar = tqdm(total=settings.epochs * steps, desc=f"ranks {R}, seed {seed}", unit="step",
               mininterval=0.5, disable=rank > 0 or not progress)  # fmt: skip
    for epoch in range(settings.epochs):
        mine = shard_sampler(n, 0 if "shard" in without else rank, R,
                             0 if "epoch" in without else epoch, seed)  # fmt: skip
        mine = torch.tensor(mine, device=device())
        start, total = time.perf_counter(), 0.0
        for step, rows in enumerate(mine.split(settings.batch // R), epoch * steps):
            optimizer.param_groups[0]["lr"] = learning_rate(settings, step, steps)
            loss = loss_of(replica, images, rows, settings)
            optimizer.zero_grad()
            loss.backward()
            if "mean" in without:
                torch._foreach_mul_([p.grad for p in model.parameters()], R)
            optimizer.step()
            total += loss.detach() * len(rows)
            bar.update()
        seen["loss"].append(float(total) / len(mine))  # waits for the device
        seen["seconds"].append(time.perf_counter() - start)
        seen["agree"].append(replicas_agree(model))
        bar.set_postfix(loss=f"{seen['loss'][-1]:.3f}", agree=str(seen["agree"][-1]))
    bar.close()
    return {**seen, "accuracy": accuracy(replica, images), "spread": spread(model),
            "images": R * len(mine)}  # fmt: skip


def make_model(settings, images):
    _, channels, side, _ = images.train.shape
    norm = "batch" if settings.norm == "sync" else settings.norm
    model = CNN(CNNConfig(channels, side, images.classes, settings.width, norm))
    model = model.to(device())
    return convert_sync_batch_norm(model) if settings.norm == "sync" else model


def replicate(model, settings):
    """`model`, made data-parallel; then what settings.without names is undone."""
    if settings.engine == "torch":
        return torch.nn.parallel.DistributedDataParallel(model)
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    replica = OverlappedDataParallel(model)
    if "broadcast" in settings.without:
        model.load_state_dict(own)
    if "average" in settings.without:
        replica.sync = False  # as if every step were inside no_sync(): so buffers stay, too
    if "buffers" in settings.without:
        replica.sync_buffers = lambda: None
    return replica


def learning_rate(settings, step, steps):
    """Scaled to the batch, with warm-up; after it half a cosine down to zero."""
    warmup = 0 if "warmup" in settings.without else settings.warmup * steps
    batch = settings.base_batch if "scaling" in settings.without else settings.batch
    lr = scale_learning_rate(settings.lr, batch, settings.base_batch, step, warmup)
    progress = max(0, step - warmup) / max(1, settings.epochs * steps - warmup)
    return lr * (1 + math.cos(math.pi * progress)) / 2


def loss_of(replica, images, rows, settings):
    x = images.train[rows]  # (B/R, C, H, W)
    if settings.augment:
        x = shifted_and_mirrored(x)
    bf16 = torch.autocast(device().type, torch.bfloat16)
    with bf16 if settings.precision == "bf16" else contextlib.nullcontext():
        logits = replica(x)  # (B/R, K)
    return F.cross_entropy(logits.float(), images.train_labels[rows])


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
