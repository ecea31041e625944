"""ImageTrainer: the training loop, fed with images for a ResNet on the ranks of a DDP run.

The only communication of a step is in backward, by DDP; every `log_every` steps 24 bytes more go
round.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from ranklab.checkpoint import RunFingerprint
from ranklab.data.image_folder import Normalise
from ranklab.data_parallel.replicas import broadcast_together
from ranklab.data_parallel.training import DataParallel
from ranklab.ddp import compress_bf16_hook, compress_fp16_hook
from ranklab.engine import device
from ranklab.models.resnet import ResNet
from ranklab.projects.ddp.data import EpochSampler, loader, open_data, steps_in_epoch
from ranklab.trainer import Trainer


def wrap(model, config, group=None, half=compress_fp16_hook):
    """`model` in DDP as production runs use it.

    gradient_as_bucket_view  gradients live in the buckets: no second copy of them in memory
    static_graph             every step uses the same parameters, so DDP looks for them once;
                             left off with torch.compile, which cuts the graph at buckets itself
    half                     the hook of --compress fp16; a learner's own will do
    """
    here = device()
    ddp = DistributedDataParallel(
        model, device_ids=[here.index] if here.type != "cpu" else None, process_group=group,
        gradient_as_bucket_view=True, static_graph=not config.compile,
        bucket_cap_mb=config.bucket_mb or None)
    if config.compress != "none":
        ddp.register_comm_hook(group, half if config.compress == "fp16" else compress_bf16_hook)
    return ddp


class Score(NamedTuple):
    """How good the model is on the held-out images, each of them counted once."""

    loss: float
    top1: float
    top5: float
    images: int


class ImageTrainer(Trainer):
    """A ResNet in DDP, its optimizer, this rank's share of the data, and the step they reached.

    data      (images to train on, held-out images); those of `config` by default
    progress  what rank 0 shows: "bar", "lines" (one for each epoch) or None
    wrap      (model, config, group) -> what computes the same, and averages gradients in backward
    """

    unit = "images"

    def __init__(self, config, data=None, group=None, progress=None, wrap=wrap):
        parallel = DataParallel(group, lambda model, group: wrap(model, config, group),
                                equal_parts=True)
        rank, ranks, (train, held_out) = parallel.rank, parallel.ranks, data or open_data(config)
        self.sampler = EpochSampler(train, ranks, rank, seed=config.seed, drop_last=True)
        self.loader = loader(train, config, self.sampler, device(), drop_last=True,
                             persistent_workers=config.workers > 0 and config.epochs > 1)
        mine = [(0, index) for index in range(rank, len(held_out), ranks)]  # each of them once
        self.held_out = loader(held_out, config, mine, device())
        self.steps_per_epoch = steps_in_epoch(len(train), config, ranks)
        self.normalise, self.units_per_step = Normalise(device()), ranks * config.batch_per_rank
        self.same_run = RunFingerprint(images_per_step=self.units_per_step, seed=config.seed,
                                       steps_per_epoch=self.steps_per_epoch)
        self.lines = progress is not None and rank == 0
        self.config, self.batches = config, None  # batches: what is left of this epoch
        super().__init__(
            new_model(config, len(train.classes)), config.loop(self.steps_per_epoch),
            config.schedule(ranks, self.steps_per_epoch),
            partial(torch.optim.SGD, lr=0.0, momentum=config.momentum, nesterov=True),
            device(), config.compile, parallel, progress == "bar")
        self.rehearse()

    def rehearse(self):
        """Two forwards and backwards; weights, statistics and gradients are as they were.

        In its first backward DDP counts gradients, in the second it learns in which order they
        come, and before the third it sorts its buckets by it. A sum in another order has other
        last bits: on three ranks or more, the first steps after a restart would differ from the
        same steps of a run that was never stopped.
        """
        config, before = self.config, [buffer.clone() for buffer in self.model.buffers()]
        images = torch.zeros(config.batch_per_rank, config.image, config.image, 3).byte()
        for _ in range(2):
            self.logits(images).sum().backward()
            self.model.zero_grad(set_to_none=True)
        for buffer, old in zip(self.model.buffers(), before):
            buffer.copy_(old)

    def next_batch(self):
        epoch, done = divmod(self.steps_done, self.steps_per_epoch)
        if done == 0 or self.batches is None:
            self.sampler.start(epoch, done * self.config.batch_per_rank)
            self.batches = iter(self.loader)
        return next(self.batches)

    def to_device(self, x):
        return x.to(self.device, non_blocking=True)  # the loader has pinned it

    def loss_sum(self, images, labels):  # (B, H, W, 3), uint8; (B,)
        logits = self.logits(images)
        return F.cross_entropy(logits.float(), labels, label_smoothing=self.config.smoothing,
                               reduction="sum")

    def logits(self, images, model=None):  # (B, H, W, 3) -> (B, K)
        x = self.normalise(self.to_device(images))  # (B, 3, H, W)
        x = x if self.config.channels_last else x.contiguous()
        with self.autocast():
            return (model or self.forward)(x)

    @torch.no_grad()
    def evaluate(self):
        """The Score over all held-out images, the same on every rank.

        Without DDP's forward, which would broadcast the buffers once for each batch: a rank with
        one batch more would wait for ever. All take rank 0's buffers, those of the checkpoint.
        """
        broadcast_together(self.model.buffers(), group=self.parallel.group)
        self.model.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        for images, labels in self.held_out:
            labels = self.to_device(labels)
            logits = self.logits(images, self.model)
            best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]  # (B, 5)
            loss = F.cross_entropy(logits.float(), labels, reduction="sum")
            sums += torch.stack([loss, best[:, 0].sum(), best.sum(), loss.new_tensor(len(labels))])
        self.model.train()
        # sums, not means: ranks may hold unequal numbers
        loss, top1, top5, images = self.parallel.total(sums).tolist()
        score = Score(loss / images, top1 / images, top5 / images, round(images))
        if self.lines and self.history.steps:
            tqdm.write(f"epoch {self.steps_done // self.steps_per_epoch}: loss "
                       f"{self.history.loss[-1]:.3f}, {self.history.speed[-1]:,.0f} images/s; "
                       f"{told(score)}")
        return score

    def shown(self):
        return {**super().shown(), "loader": f"{1e3 * self.history.waits[-1]:.1f} ms"}

    def saved(self):
        return {**super().saved(), "run": self.same_run}


def new_model(config, classes):
    """A fresh ResNet, the same on every rank."""
    # A GPU tries in the rehearsal which of its kernels suits each convolution: shapes stay.
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(config.seed)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    return ResNet(config.shape(classes)).to(device(), memory_format=layout)


def told(score):
    return (f"top-1 {score.top1:.1%}, top-5 {score.top5:.1%}, loss {score.loss:.3f} on "
            f"{score.images:,} images")
