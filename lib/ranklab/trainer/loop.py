"""The training loop of the course, for any number of processes: see parallel.py.

Read `fit`, then `step`. The code path is the same for CPU and CUDA, and a step never waits for the
device: a GPU is kept busy only when Python runs ahead of it. The loop waits only to print a number.
A subclass defines the model and the data: TextTrainer (text.py) for a GPT,
ImageTrainer (projects/ddp/image_trainer.py) for a ResNet.
"""

import contextlib
import math
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from tqdm import tqdm

from ranklab.basics.options import check_options, new_folder, option
from ranklab.checkpoint import load_checkpoint, save_checkpoint
from ranklab.trainer.parallel import Parallel
from ranklab.trainer.stop_signal import StopSignal

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LoopConfig:
    """Settings of the loop that do not depend on the model; checked on creation."""

    micro_batch: int = option(12, "rows in one forward and backward", least=1)
    weight_decay: float = option(0.1, "of matrices, by AdamW", least=0)
    clip: float = option(1.0, "the largest norm of all gradients; 0: as large as they are", least=0)
    precision: str = option("fp32", "bf16, fp16: by autocast", PRECISIONS)
    log_every: int = option(50, "steps; also how long a SIGTERM waits for an answer", least=1)
    eval_every: int = option(0, "steps; 0: only at the end", least=0)
    checkpoint: str | None = option(None, "save to this folder", kind=new_folder)
    checkpoint_every: int = option(0, "steps; 0: only at the end", least=0)

    def __post_init__(self):
        check_options(self)


@dataclass
class History:
    """What fit recorded at each logged step, the same on every rank."""

    steps: list = field(default_factory=list)
    loss: list = field(default_factory=list)  # the mean over the whole batch
    speed: list = field(default_factory=list)  # tokens, or images, per second; first entry: 0
    waits: list = field(default_factory=list)  # seconds per step for data, on the slowest rank
    held_out: dict = field(default_factory=dict)  # step -> the result of evaluate


class Schedule(NamedTuple):
    """What learning_rate needs; any object with these four attributes will do."""

    lr: float  # the highest
    warmup: int  # steps
    steps: int  # to the end
    final_lr: float = 0.0  # fraction of lr that is left at the end


def learning_rate(schedule, step):
    """Return the learning rate of a step: linear warm-up, then half a cosine.

    The cosine ends at `final_lr` of the peak.
    """
    if step < schedule.warmup:
        return schedule.lr * (step + 1) / schedule.warmup
    progress = (step - schedule.warmup) / max(1, schedule.steps - schedule.warmup)
    cosine = (1 + math.cos(math.pi * progress)) / 2  # from 1 to 0
    return schedule.lr * (schedule.final_lr + (1 - schedule.final_lr) * cosine)


def decay_groups(model, weight_decay):
    """Split the trained parameters, by name, into two groups for an optimizer.

    Matrices decay; norms and biases do not, because they should not be pulled to zero.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [(name, p) for name, p in trained if p.dim() >= 2],
         "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


class Trainer:
    """Train a model: hold the model, its optimizer and the number of steps done.

    A subclass defines:
        next_batch()               this rank's (inputs, targets) of step number steps_done
        loss_sum(inputs, targets)  the sum of the losses of the targets that count
        evaluate()                 the score on held-out data, the same on all ranks
        unit, units_per_step       "tokens", and how many all ranks together process in a step

    loop: a LoopConfig.
    schedule: a Schedule, or an object with its attributes.
    new_optimizer: (groups of named parameters) -> a torch optimizer.
    parallel: a Parallel, which spreads a step over ranks; one process by default.
    """

    unit, units_per_step, title = "items", 0, None  # title: what stands before the bar

    def __init__(self, model, loop, schedule, new_optimizer, device="cpu", compile=False,
                 parallel=None, progress=True):  # fmt: skip
        self.device = torch.device(device)
        self.parallel = parallel or Parallel()
        self.loop, self.schedule = loop, schedule
        is_meta = any(p.is_meta for p in model.parameters())  # only its shards get memory
        self.model = model if is_meta else model.to(self.device)
        groups = decay_groups(self.model, loop.weight_decay)
        # Keep the plain model's state dict: wrappers and torch.compile prefix its names.
        self.forward = self.parallel.apply(self.model)
        self.forward = torch.compile(self.forward) if compile else self.forward
        self.optimizer = self.parallel.make_optimizer(new_optimizer, groups)
        # only fp16 needs a scaled loss; a disabled scaler passes everything through
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=loop.precision == "fp16")
        self.one = torch.ones((), device=self.device)
        self.scaler.scale(self.one)  # it makes its scale on first use
        self.progress = progress and self.parallel.rank == 0
        self.steps_done, self.stopped, self.history = 0, False, History()
        self.waits = []  # for data, in seconds, at each step since the last log

    # --- the loop -------------------------------------------------------------------------------

    def fit(self, until=None):
        """Train until the end, step `until`, or a SIGTERM; return the History."""
        last = min(until or self.schedule.steps, self.schedule.steps)
        bar = tqdm(total=self.schedule.steps, initial=self.steps_done, desc=self.title, unit="step",
                   disable=not self.progress, mininterval=0.5)  # fmt: skip
        with StopSignal() as stop, bar:
            clock = Clock()
            while self.steps_done < last and not stop.agreed:
                share = self.step()
                bar.update()
                self.after_step(share, self.steps_done == last, stop, clock, bar)
        self.stopped = stop.agreed
        return self.history

    def after_step(self, share, is_last, stop, clock, bar):
        """Do what is due after this step: log, evaluate, save."""
        loop, at = self.loop, self.steps_done
        is_end = at == self.schedule.steps
        scores = is_end or due(at, loop.eval_every)
        # the first step is logged too: it compiles and warms up, and the clock starts after it
        if scores or is_last or due(at, loop.log_every) or not self.history.steps:
            self.log(share, stop, clock, bar)
        if is_last or stop.agreed or due(at, loop.checkpoint_every):
            self.save()
            clock.restart(at)
        if scores and not stop.agreed:
            self.history.held_out[at] = self.evaluate()
            clock.restart(at)

    def step(self, batch=None):
        """Do one optimizer step; return this rank's share of its loss, still on the device.

        batch: this rank's (inputs, targets); next_batch() by default
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        start = time.perf_counter()
        batch = batch or self.next_batch()
        self.waits.append(time.perf_counter() - start)
        self.optimizer.zero_grad(set_to_none=True)
        # in fp16 a tensor, because get_scale() would wait for the device
        scale = self.scaler.scale(self.one) if self.scaler.is_enabled() else 1.0
        inputs, targets = (self.to_device(x) for x in batch)
        share = self.parallel.forward_backward(self.loss_sum, inputs, targets,
                                               self.loop.micro_batch, scale)
        if self.loop.clip or self.scaler.is_enabled():  # fp16: all ranks skip a step, or none
            self.clip((self.loop.clip or math.inf) * scale)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps_done += 1
        return share

    def rate(self):
        return learning_rate(self.schedule, self.steps_done)

    def clip(self, max_norm):
        """Scale all gradients to a norm of at most max_norm.

        If the norm is not finite, all gradients become NaN on every rank, so that fp16's scalers
        agree on which steps to skip.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = self.parallel.grad_norm(parameters)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        factor = factor.to(norm.device)  # offloaded gradients are on the CPU, the scale is not
        factor = torch.where(norm.isfinite(), factor, torch.nan)
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)

    def autocast(self):
        """Return a context in which matrix products are computed in loop.precision.

        Weights, norms and the loss stay in float32.
        """
        dtype = PRECISIONS[self.loop.precision]
        if dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    def to_device(self, x):
        if self.device.type == "cpu":
            return x
        return x.pin_memory().to(self.device, non_blocking=True)  # copied while Python continues

    def log(self, share, stop, clock, bar):
        """Add the loss, speed and waits of all ranks to the history; wait for the device."""
        wait = sum(self.waits) / max(1, len(self.waits))
        row = torch.stack([share.double(), *share.new_tensor([wait, stop.received]).double()])
        shares, waits, stops = self.parallel.gather(row).T.tolist()
        stop.agreed = any(stops)  # so that all ranks stop after the same step
        self.history.steps.append(self.steps_done)
        self.history.loss.append(self.parallel.total_of(shares))
        self.history.waits.append(max(waits))
        self.history.speed.append(self.units_per_step * clock.steps_per_second(self.steps_done))
        self.waits = []
        bar.set_postfix(self.shown(), refresh=False)

    def shown(self):
        """Return the text shown next to the progress bar: {name: text}."""
        history = self.history
        return {"loss": f"{history.loss[-1]:.3f}", f"{self.unit}/s": f"{history.speed[-1]:,.0f}"}

    # --- to the disk and back -------------------------------------------------------------------

    def saved(self):
        """Return {name: object with a state_dict} to save in addition to model, optimizer and step.
        """
        return {"scaler": self.scaler}

    def save(self):
        """Save a checkpoint to loop.checkpoint. Collective: call it on every rank."""
        if self.loop.checkpoint:
            save_checkpoint(self.loop.checkpoint, self.parallel, self.model, self.optimizer,
                            self.steps_done, self.saved(), self.device)  # fmt: skip

    def resume(self, reshard=None):
        """Load the last checkpoint of loop.checkpoint; the next steps are bit-identical.

        Random numbers continue if the number of ranks is the same as before. (On GPUs the steps are
        bit-identical only if the kernels are deterministic: some add in a varying order.)
        reshard: see load_checkpoint.
        """
        self.steps_done = load_checkpoint(
            self.loop.checkpoint, self.parallel, self.model, self.optimizer, self.device,
            self.saved(), reshard)  # fmt: skip


def due(step, interval):
    """Return True at every interval-th step; never if interval is 0."""
    return interval > 0 and step % interval == 0


class Clock:
    """Measure steps per second between two calls; time before `restart` does not count."""

    def __init__(self):
        self.restart(None)

    def restart(self, step):
        self.step, self.time = step, time.perf_counter()

    def steps_per_second(self, step):
        """Return the steps per second since the last call.

        0 at the first call, because its time includes compiling and warming up.
        """
        elapsed = time.perf_counter() - self.time
        speed = 0.0 if self.step is None or step == self.step else (step - self.step) / elapsed
        self.restart(step)
        return speed
