"""The training loop of the course, for one process and for any number: see parallel.py.

Read `fit`, then `step`. One code path for CPU and CUDA, and no wait for the device inside a step:
a GPU is kept busy only when Python runs ahead of it. Waits are where a number is printed.
"""

import contextlib
import math
import time
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from ranklab.baseline.flops import transformer_flops
from ranklab.checkpoint import load_checkpoint, save_checkpoint
from ranklab.data import batch_at, held_out_batch
from ranklab.parallel import Parallel

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TrainConfig:
    """How to train; checked when it is made. The defaults suit two CPU cores."""

    steps: int = 1000
    batch: int = 12  # sequences in a step, over all ranks
    micro_batch: int = 12  # sequences in one forward and backward
    lr: float = 5e-3
    warmup: int = 20  # steps
    final_lr: float = 0.02  # fraction of lr that is left at the end
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    precision: str = "fp32"
    seed: int = 0  # of the order of the data
    log_every: int = 50
    eval_every: int = 0  # 0: only at the end
    eval_batch: int = 256  # held-out sequences
    checkpoint: str | None = None  # path
    checkpoint_every: int = 0  # 0: only at the end

    def __post_init__(self):
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r} must be one of {list(PRECISIONS)}")
        for name in ("steps", "batch", "micro_batch", "log_every", "eval_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass
class History:
    """What fit saw, at each step that was logged."""

    steps: list = field(default_factory=list)
    loss: list = field(default_factory=list)
    tokens_per_second: list = field(default_factory=list)
    held_out: dict = field(default_factory=dict)  # step -> loss


def learning_rate(config, step):
    """Linear warm-up, then half a cosine down to `final_lr` of the peak."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    cosine = (1 + math.cos(math.pi * progress)) / 2  # from 1 to 0
    return config.lr * (config.final_lr + (1 - config.final_lr) * cosine)


def decay_groups(model, weight_decay):
    """The trained parameters by name, in two groups for an optimizer: matrices decay; norms and
    biases do not, since zero is not where they belong.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [(name, p) for name, p in trained if p.dim() >= 2],
         "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


class Trainer:
    """A model, its optimizer, its data and the step that they have reached.

    peak_flops  of all ranks together, for MFU; None: MFU is not shown
    parallel    how the step is spread over ranks; one process by default
    """

    def __init__(self, model, text, config, device="cpu", compile=False, peak_flops=None,
                 parallel=None, progress=True):  # fmt: skip
        self.device = torch.device(device)
        self.parallel = parallel or Parallel()
        self.model = model.to(self.device)
        groups = decay_groups(self.model, config.weight_decay)
        # The state dict stays that of the plain model: wrappers and torch.compile prefix its names.
        self.forward = self.parallel.apply(self.model)
        self.forward = torch.compile(self.forward) if compile else self.forward
        self.text, self.config = text, config
        self.peak_flops = peak_flops
        self.progress = progress and self.parallel.rank == 0
        self.optimizer = self.parallel.make_optimizer(groups, lr=config.lr, betas=config.betas)
        # fp16 alone needs a scaled loss; switched off, the scaler passes everything through
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.steps_done = 0
        self.n_ctx = self.model.config.n_ctx
        self.history = History()

    def fit(self):
        """The model is trained to config.steps; returns the History."""
        config, clock = self.config, Clock()
        bar = tqdm(total=config.steps, initial=self.steps_done, disable=not self.progress,
                   unit="step", mininterval=0.5)  # fmt: skip
        with bar:
            while self.steps_done < config.steps:
                loss = self.step()
                bar.update()
                at, is_last = self.steps_done, self.steps_done == config.steps
                # the first step is logged too: it compiles and warms up, and then the clock starts
                if at % config.log_every == 0 or is_last or len(self.history.steps) == 0:
                    self.log(loss, clock, bar)
                if is_last or (config.eval_every and at % config.eval_every == 0):
                    self.history.held_out[at] = self.evaluate()
                    clock.restart(at)
                every = config.checkpoint_every
                if config.checkpoint and (is_last or (every and at % every == 0)):
                    self.save()
                    clock.restart(at)
        return self.history

    def step(self):
        """One optimizer step; returns this process's share of its loss, still on the device."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, self.steps_done)
        batch = batch_at(self.text.train, self.steps_done, config.batch, self.n_ctx, config.seed)
        inputs, targets = (self.to_device(x) for x in self.parallel.batch(*batch))
        self.optimizer.zero_grad(set_to_none=True)
        scale = self.scaler.get_scale()
        share = self.parallel.forward_backward(self.scaled_loss_sum, inputs, targets,
                                               config.micro_batch)  # fmt: skip
        self.clip(config.clip * scale)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps_done += 1
        return share / scale

    def scaled_loss_sum(self, inputs, targets):
        with self.autocast():
            return self.scaler.scale(self.forward(inputs, targets, "sum"))

    def clip(self, most):
        """The norm of all gradients is `most` or less. One that is not finite makes all of them
        NaN, on every rank: so fp16's scalers agree on which steps to skip.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = self.parallel.grad_norm(parameters)
        factor = (most / (norm + 1e-6)).clamp(max=1.0)
        factor = torch.where(norm.isfinite(), factor, torch.nan)
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)

    def autocast(self):
        """Matrix products in config.precision; weights, norms and the loss stay in float32."""
        dtype = PRECISIONS[self.config.precision]
        if dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    @torch.no_grad()
    def evaluate(self):
        """The mean loss on the held-out windows, in nats per token, alike on all ranks."""
        config = self.config
        window = held_out_batch(self.text.held_out, config.eval_batch, self.n_ctx)
        inputs, targets = (self.to_device(x) for x in self.parallel.batch(*window))
        count, total = self.parallel.token_count(targets), 0.0
        self.model.eval()
        for x, y in zip(inputs.split(config.micro_batch), targets.split(config.micro_batch)):
            with self.autocast():  # not self.forward: it would compile once more, without autograd
                total += self.model(x, y, "sum")
        self.model.train()
        return (self.parallel.total(total) / count).item()

    def log(self, loss, clock, bar):
        """Loss and speed are in the history and beside the bar. Waits for the device."""
        loss = self.parallel.total(loss).item()
        tokens = self.config.batch * self.n_ctx
        speed = tokens * clock.steps_per_second(self.steps_done)
        self.history.steps.append(self.steps_done)
        self.history.loss.append(loss)
        self.history.tokens_per_second.append(speed)
        shown = {"loss": f"{loss:.3f}", "tokens/s": f"{speed:,.0f}"}
        if self.peak_flops:
            shown["MFU"] = f"{self.flops_per_token * speed / self.peak_flops:.1%}"
        bar.set_postfix(shown, refresh=False)

    @property
    def flops_per_token(self):
        return transformer_flops(self.model.config, 1, self.n_ctx) / self.n_ctx

    def to_device(self, x):
        if self.device.type != "cuda":
            return x
        return x.pin_memory().to(self.device, non_blocking=True)  # copied while Python goes on

    def save(self):
        """config.checkpoint holds this moment."""
        save_checkpoint(self.config.checkpoint, self.model, self.optimizer, self.steps_done,
                        scaler=self.scaler)  # fmt: skip

    def resume(self):
        """The trainer stands where config.checkpoint was saved; the next steps are bit-equal."""
        self.steps_done = load_checkpoint(self.config.checkpoint, self.model, self.optimizer,
                                          self.device, scaler=self.scaler)  # fmt: skip


class Clock:
    """Steps per second between two looks; what happens before `restart` does not count."""

    def __init__(self):
        self.restart(None)

    def restart(self, step):
        self.step, self.time = step, time.perf_counter()

    def steps_per_second(self, step):
        """Since the last look; 0 at the first, which includes compiling and warming up."""
        elapsed = time.perf_counter() - self.time
        speed = 0.0 if self.step is None or step == self.step else (step - self.step) / elapsed
        self.restart(step)
        return speed
