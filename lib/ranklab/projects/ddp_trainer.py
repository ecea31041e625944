"""One rank of a DDP training run on images: step, evaluate, save, resume, stop.

Read `fit`, then `step`. It is ranklab.trainer's loop, for images and for many ranks; the warm-up,
the cosine and the checkpoint file are the same functions. The only communication of a step is in
backward, by DDP; every `log_every` steps 24 bytes more go round.
"""

import contextlib
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from ranklab.checkpoint import load_checkpoint, save_checkpoint
from ranklab.data.image_folder import Normalise
from ranklab.engine import device
from ranklab.projects.ddp_config import AMP, schedule
from ranklab.projects.ddp_data import held_out_loader, train_loader
from ranklab.projects.ddp_model import new_model, rehearse, same_buffers, wrap
from ranklab.projects.ddp_stop import SameRun, StopSignal
from ranklab.trainer import Clock, decay_groups, learning_rate


class Score(NamedTuple):
    """How good the model is on the held-out images, each of them counted once."""

    loss: float
    top1: float
    top5: float
    images: int


@dataclass
class History:
    """What fit saw at each step that was logged, the same on every rank."""

    steps: list = field(default_factory=list)
    loss: list = field(default_factory=list)  # over all ranks
    images_per_second: list = field(default_factory=list)  # of all ranks; 0 at the first
    loader_wait: list = field(default_factory=list)  # seconds a step, on the rank that waits most
    scores: dict = field(default_factory=dict)  # epochs done -> Score


class ImageTrainer:
    """A ResNet in DDP, its optimizer, this rank's share of the data, and the step they reached.

    progress  what rank 0 shows: "bar", "lines" (one for each epoch) or None
    parallel  (model, config, group) -> what computes the same, and averages gradients in backward
    """

    def __init__(self, config, train, held_out, group=None, progress=None, parallel=wrap):
        self.config, self.group, self.device = config, group, device()
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.progress = progress if self.rank == 0 else None
        share = config, self.rank, self.ranks, self.device
        self.loader, self.sampler, self.steps_per_epoch = train_loader(train, *share)
        self.held_out = held_out_loader(held_out, *share)
        self.schedule = schedule(config, self.ranks, self.steps_per_epoch)
        self.normalise = Normalise(self.device)
        self.model = new_model(config, len(train.classes), self.device)
        parallel_model = parallel(self.model, config, group)
        self.forward = torch.compile(parallel_model) if config.compile else parallel_model
        self.optimizer = torch.optim.SGD(decay_groups(self.model, config.weight_decay), lr=0.0,
                                         momentum=config.momentum, nesterov=True)  # fmt: skip
        # fp16 alone needs a scaled loss; switched off, the scaler passes everything through
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp == "fp16")
        self.same_run = SameRun(images_per_step=self.ranks * config.batch_per_rank,
                                steps_per_epoch=self.steps_per_epoch, seed=config.seed)  # fmt: skip
        self.steps_done, self.stopped, self.history = 0, False, History()
        self.waits = []  # for the loader, in seconds, at each step since the last log
        images = torch.zeros(config.batch_per_rank, config.image, config.image, 3)
        rehearse(self.model, self.logits, self.to_device(images.byte()))

    # --- the loop -------------------------------------------------------------------------------

    def fit(self, until=None):
        """Trained to the end, or to step `until`, or to a SIGTERM; returns the History."""
        last = min(until or self.schedule.steps, self.schedule.steps)
        bar = tqdm(total=self.schedule.steps, initial=self.steps_done, unit="step",
                   disable=self.progress != "bar", mininterval=0.5)  # fmt: skip
        with StopSignal() as stop, bar:
            clock = Clock()
            while self.steps_done < last and not stop.agreed:
                epoch, done = divmod(self.steps_done, self.steps_per_epoch)
                self.sampler.start(epoch, done * self.config.batch_per_rank)
                self.train(min(last, (epoch + 1) * self.steps_per_epoch), stop, clock, bar)
                self.save()
                if self.steps_done == (epoch + 1) * self.steps_per_epoch and not stop.agreed:
                    self.history.scores[epoch + 1] = self.evaluate()
                    self.tell(epoch + 1)
                clock.restart(self.steps_done)
        self.stopped = stop.agreed
        return self.history

    def train(self, last, stop, clock, bar):
        """The steps up to `last`, inside one epoch; fewer when all ranks agree to stop."""
        every = self.config.checkpoint_every
        batches = iter(self.loader)
        while self.steps_done < last and not stop.agreed:
            start = time.perf_counter()
            images, labels = next(batches)
            self.waits.append(time.perf_counter() - start)
            loss = self.step(images, labels)
            bar.update()
            at = self.steps_done
            # the first step is logged too: it compiles and warms up, and then the clock starts
            if at % self.config.log_every == 0 or at == last or not self.history.steps:
                self.log(loss, stop, clock, bar)
            if every and at % every == 0 and at < last:
                self.save()

    def step(self, images, labels):
        """One optimizer step; returns this rank's loss, still on the device.
        shape  images (B, H, W, 3), uint8; labels (B,)
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.schedule, self.steps_done)
        labels = labels.to(self.device, non_blocking=True)
        logits = self.logits(self.to_device(images))
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=self.config.smoothing)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()  # DDP sums the gradients meanwhile
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps_done += 1
        return loss.detach()

    def to_device(self, images):  # (B, H, W, 3) -> (B, 3, H, W)
        x = self.normalise(images.to(self.device, non_blocking=True))
        return x if self.config.channels_last else x.contiguous()

    def logits(self, x):  # (B, 3, H, W) -> (B, K)
        with self.autocast():
            return self.forward(x)

    def autocast(self):
        """Convolutions in config.amp; weights, norms and the loss stay in float32."""
        if self.config.amp == "none":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=AMP[self.config.amp])

    # --- what is known --------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self):
        """The Score over all held-out images, the same on every rank.

        Without DDP's forward, which would broadcast the buffers once for each batch: a rank with
        one batch more would wait for ever.
        """
        same_buffers(self.model, self.group)
        self.model.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        for images, labels in self.held_out:
            labels = labels.to(self.device, non_blocking=True)
            with self.autocast():
                logits = self.model(self.to_device(images))
            best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]  # (B, 5)
            loss = F.cross_entropy(logits.float(), labels, reduction="sum")
            sums += torch.stack([loss, best[:, 0].sum(), best.sum(), loss.new_tensor(len(labels))])
        self.model.train()
        dist.all_reduce(sums, group=self.group)  # sums, not means: ranks may hold unequal numbers
        loss, top1, top5, images = sums.tolist()
        return Score(loss / images, top1 / images, top5 / images, round(images))

    def log(self, loss, stop, clock, bar):
        """Loss, speed and waiting of all ranks are in the history. Waits for the device."""
        wait = sum(self.waits) / max(1, len(self.waits))
        mine = torch.stack([loss.double(), *loss.new_tensor([wait, stop.received]).double()])
        everybodys = mine.new_empty(self.ranks * 3)
        dist.all_gather_single(everybodys, mine, group=self.group)
        losses, waits, stops = everybodys.view(self.ranks, 3).t().tolist()
        stop.agreed = any(stops)  # so all ranks stop after the same step
        history, images = self.history, self.ranks * self.config.batch_per_rank
        history.images_per_second.append(images * clock.steps_per_second(self.steps_done))
        history.loader_wait.append(max(waits))
        history.steps.append(self.steps_done)
        history.loss.append(sum(losses) / self.ranks)
        self.waits = []
        bar.set_postfix({"loss": f"{history.loss[-1]:.3f}", "images/s":
                         f"{history.images_per_second[-1]:,.0f}", "loader":
                         f"{1e3 * history.loader_wait[-1]:.1f} ms"}, refresh=False)  # fmt: skip

    def tell(self, epoch):
        if self.progress:
            score, history = self.history.scores[epoch], self.history
            tqdm.write(f"epoch {epoch}: loss {history.loss[-1]:.3f}, top-1 {score.top1:.1%}, "
                       f"top-5 {score.top5:.1%} of {score.images:,} held-out images, "
                       f"{history.images_per_second[-1]:,.0f} images/s")  # fmt: skip

    # --- to the disk and back -------------------------------------------------------------------

    def save(self):
        """config.checkpoint holds this moment. Rank 0 writes; the others go on, and wait for it in
        the next all-reduce.
        """
        if self.config.checkpoint and self.rank == 0:
            save_checkpoint(self.config.checkpoint, self.model, self.optimizer, self.steps_done,
                            scaler=self.scaler, run=self.same_run)  # fmt: skip

    def resume(self):
        """The trainer stands where config.checkpoint was saved; the next steps are bit-equal.

        Every rank reads the file, and no rank waits for another: it was renamed into place whole.
        The random numbers in it are rank 0's, which is right for a model that draws none. (On GPUs
        bit-equal as far as cuDNN's kernels are: some add in an order that changes.)
        """
        self.steps_done = load_checkpoint(self.config.checkpoint, self.model, self.optimizer,
                                          self.device, scaler=self.scaler, run=self.same_run)
