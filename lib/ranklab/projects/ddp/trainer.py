"""ImageTrainer: the training loop, fed with images for a ResNet on the ranks of a DDP run.

The only communication of a step is in backward, by DDP; every `log_every` steps 24 bytes more go
round.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

from ranklab.checkpoint import RunFingerprint
from ranklab.data.image_folder import Normalise
from ranklab.data_parallel.training import DataParallel
from ranklab.engine import device
from ranklab.projects.ddp.config import schedule
from ranklab.projects.ddp.data import held_out_loader, train_loader
from ranklab.projects.ddp.model import new_model, rehearse, same_buffers, wrap
from ranklab.trainer import Trainer


class Score(NamedTuple):
    """How good the model is on the held-out images, each of them counted once."""

    loss: float
    top1: float
    top5: float
    images: int


class ImageTrainer(Trainer):
    """A ResNet in DDP, its optimizer, this rank's share of the data, and the step they reached.

    progress  what rank 0 shows: "bar", "lines" (one for each epoch) or None
    wrap      (model, config, group) -> what computes the same, and averages gradients in backward
    """

    unit = "images"

    def __init__(self, config, train, held_out, group=None, progress=None, wrap=wrap):
        parallel = DataParallel(group, lambda model, group: wrap(model, config, group),
                                equal_parts=True)  # fmt: skip
        share = config, parallel.rank, parallel.ranks, device()
        self.loader, self.sampler, self.steps_per_epoch = train_loader(train, *share)
        self.held_out = held_out_loader(held_out, *share)
        self.normalise = Normalise(device())
        self.units_per_step = parallel.ranks * config.batch_per_rank
        self.same_run = RunFingerprint(images_per_step=self.units_per_step,
                                steps_per_epoch=self.steps_per_epoch, seed=config.seed)  # fmt: skip
        self.lines = progress is not None and parallel.rank == 0
        self.config, self.batches = config, None  # batches: what is left of this epoch
        super().__init__(
            new_model(config, len(train.classes), device()), config.loop(self.steps_per_epoch),
            schedule(config, parallel.ranks, self.steps_per_epoch),
            partial(torch.optim.SGD, lr=0.0, momentum=config.momentum, nesterov=True),
            device(), config.compile, parallel, progress == "bar")
        images = torch.zeros(config.batch_per_rank, config.image, config.image, 3)
        rehearse(self.model, self.logits, images.byte())

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
                               reduction="sum")  # fmt: skip

    def logits(self, images, model=None):  # (B, H, W, 3) -> (B, K)
        x = self.normalise(self.to_device(images))  # (B, 3, H, W)
        x = x if self.config.channels_last else x.contiguous()
        with self.autocast():
            return (model or self.forward)(x)

    @torch.no_grad()
    def evaluate(self):
        """The Score over all held-out images, the same on every rank.

        Without DDP's forward, which would broadcast the buffers once for each batch: a rank with
        one batch more would wait for ever.
        """
        same_buffers(self.model, self.parallel.group)
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
        self.tell(score)
        return score

    def tell(self, score):
        history = self.history
        if self.lines and history.steps:
            tqdm.write(f"epoch {self.steps_done // self.steps_per_epoch}: loss "
                       f"{history.loss[-1]:.3f}, top-1 {score.top1:.1%}, top-5 {score.top5:.1%} of "
                       f"{score.images:,} held-out images, {history.speed[-1]:,.0f} images/s")

    def shown(self):
        return {**super().shown(), "loader": f"{1e3 * self.history.waits[-1]:.1f} ms"}

    def saved(self):
        return {**super().saved(), "run": self.same_run}
