"""ImageTrainer: the training loop, fed with images for a ResNet."""

import signal
import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

from ranklab.basics.options import check_options, new_folder, option
from ranklab.checkpoint import RunFingerprint
from ranklab.data.image_folder import Normalise
from ranklab.data_parallel import scale_learning_rate
from ranklab.data_parallel.replicas import broadcast_together
from ranklab.engine import device
from ranklab.trainer import PRECISIONS, LoopConfig, Schedule, Trainer

REFERENCE_BATCH = 256  # images in a step, for which the learning rate is meant
MOMENTUM, WEIGHT_DECAY, SMOOTHING = 0.9, 1e-4, 0.1  # SMOOTHING: of the labels
PREFETCH = 4  # batches that each worker keeps ready


@dataclass(frozen=True)
class ImageConfig:
    """The training settings, validated when created. The defaults are the usual ImageNet ones."""

    batch_per_rank: int = option(
        256, "images in a step on each rank; the learning rate grows with all of them", least=1)
    epochs: int = option(90, "how often each image is seen", least=1)
    lr: float = option(0.1, "for 256 images a step", least=0)
    warmup_epochs: float = option(5, "in which the learning rate grows", least=0)
    precision: str = option("fp32", "bf16, fp16: by autocast", PRECISIONS)
    workers: int = option(8, "processes per rank that read images; 0: the rank itself", least=0)
    seed: int = option(0, "of weights, order and crops", least=0)
    log_every: int = option(50, "steps; also how long a SIGTERM waits for an answer", least=1)
    checkpoint: str | None = option(None, "save to this folder", kind=new_folder)
    checkpoint_every: int = option(0, "steps; by default after each epoch", least=0)

    def __post_init__(self):
        check_options(self)

    def steps_per_epoch(self, images, ranks):
        """Count the full steps in an epoch of this many images.

        Raises: ValueError if there are too few for one step
        """
        if images < (batch := ranks * self.batch_per_rank):
            raise ValueError(f"{images} images are less than one step: {ranks} ranks of "
                             f"batch_per_rank={self.batch_per_rank} take {batch}")
        return images // batch

    def loop(self, steps):
        """Return the LoopConfig for epochs of `steps` steps.

        Each epoch ends with an evaluation and, unless checkpoint_every is set, with a checkpoint.
        """
        return LoopConfig(self.batch_per_rank, WEIGHT_DECAY, 0.0, self.precision, self.log_every,
                          steps, self.checkpoint, self.checkpoint_every or steps)

    def schedule(self, steps, images):
        """Return the Schedule of epochs of `steps` steps each.

        The learning rate grows with the images per step.
        """
        return Schedule(scale_learning_rate(self.lr, images, REFERENCE_BATCH),
                        round(self.warmup_epochs * steps), self.epochs * steps)


class ImageTrainer(Trainer):
    """A trainer of a model on images by SGD; each rank has its share of the images.

    train, held_out  as in data/image_folder.py: `images[epoch, index]` is (bytes, label)
    progress         rank 0 shows a line for each epoch, and in a terminal a bar
    """

    unit = "images"

    def __init__(self, model, train, held_out, config, parallel, compile=False, progress=False):
        rank, ranks, self.train, self.held_out = parallel.rank, parallel.ranks, train, held_out
        self.sampler = DistributedSampler(train, ranks, rank, seed=config.seed, drop_last=True)
        steps = self.steps_per_epoch = config.steps_per_epoch(len(train), ranks)
        images = self.units_per_step = ranks * config.batch_per_rank
        self.same_run = RunFingerprint(images_per_step=images, seed=config.seed,
                                       steps_per_epoch=steps)
        self.config, self.normalise = config, Normalise(device())
        self.batches, self.lines = None, progress and rank == 0  # batches: the rest of this epoch
        torch.backends.cudnn.benchmark = True  # a GPU tries its kernels once: shapes stay
        sgd = partial(torch.optim.SGD, lr=0.0, momentum=MOMENTUM, nesterov=True)
        super().__init__(model.to(memory_format=torch.channels_last), config.loop(steps),
                         config.schedule(steps, images), sgd, device(), compile, parallel,
                         progress and sys.stderr.isatty())

    def next_batch(self):
        """Return this rank's next batch of the epoch.

        All ranks shuffle in the same way, by (seed, epoch), and take every R-th image.
        """
        epoch, step = divmod(self.steps_done, self.steps_per_epoch)
        if step == 0 or self.batches is None:
            self.sampler.set_epoch(epoch)  # if this is forgotten, every epoch has the same order
            rest = [(epoch, index) for index in self.sampler][step * self.config.batch_per_rank:]
            self.batches = iter(self.loader(self.train, rest, drop_last=True))
        return next(self.batches)

    def loader(self, images, numbers, **options):
        """Load batches of the images (epoch, index) in `numbers`, by config.workers processes."""
        return DataLoader(
            images, self.config.batch_per_rank, sampler=numbers, num_workers=self.config.workers,
            pin_memory=self.device.type != "cpu",  # so that copies to the GPU overlap its work
            prefetch_factor=PREFETCH if self.config.workers else None,
            worker_init_fn=outlive_sigterm, generator=torch.Generator(), **options)

    def to_device(self, x):
        return x.to(self.device, non_blocking=True)  # the loader has pinned it

    def loss_sum(self, images, labels):  # (B, H, W, 3), uint8; (B,)
        return F.cross_entropy(self.logits(self.forward, images), labels, reduction="sum",
                               label_smoothing=SMOOTHING)

    def logits(self, model, images):  # (B, H, W, 3) -> (B, K)
        with self.autocast():
            return model(self.normalise(self.to_device(images))).float()

    @torch.no_grad()
    def evaluate(self):
        """Return top-1: the share of held-out images classified correctly, each counted once.

        DDP's forward is not used: it would broadcast the buffers once for each batch, so that a
        rank with one more batch would wait forever. All ranks use rank 0's buffers, which are
        also in the checkpoint. Collective: call it on every rank.
        """
        broadcast_together(self.model.buffers(), group=self.parallel.group)
        self.model.eval()
        right, count = torch.zeros((), device=self.device), len(self.held_out)
        local = [(0, index) for index in range(self.parallel.rank, count, self.parallel.ranks)]
        for images, labels in self.loader(self.held_out, local):  # none padded, none left out
            right += (self.logits(self.model, images).argmax(1) == self.to_device(labels)).sum()
        self.model.train()
        top1 = self.parallel.total(right).item() / count
        if self.lines and self.history.steps:
            tqdm.write(f"epoch {self.steps_done // self.steps_per_epoch}: loss "
                       f"{self.history.loss[-1]:.3f}, {self.history.speed[-1]:,.0f} images/s, "
                       f"held-out top-1 {top1:.1%}")
        return top1

    def saved(self):
        return {**super().saved(), "run": self.same_run}


def outlive_sigterm(_worker):
    """Ignore SIGTERM in a worker.

    A SIGTERM to the job reaches the workers as well, and the last steps still need them.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
