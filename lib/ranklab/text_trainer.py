"""TextTrainer: the training loop, fed with text for a GPT."""

from dataclasses import dataclass
from functools import partial

import torch

from ranklab.baseline.flops import transformer_flops
from ranklab.data import batch_at, held_out_batch
from ranklab.trainer import LoopConfig, Trainer


@dataclass(frozen=True)
class TrainConfig(LoopConfig):
    """How to train; checked when it is made. The defaults suit two CPU cores."""

    steps: int = 1000
    batch: int = 12  # sequences in a step, over all ranks
    lr: float = 5e-3
    warmup: int = 20  # steps
    final_lr: float = 0.02  # fraction of lr that is left at the end
    betas: tuple[float, float] = (0.9, 0.95)
    seed: int = 0  # of the order of the data
    eval_batch: int = 256  # held-out sequences

    def __post_init__(self):
        super().__post_init__()
        for name in ("steps", "batch", "eval_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


class TextTrainer(Trainer):
    """A GPT, trained on a Text by AdamW in one fused kernel.

    peak_flops  of all ranks together, for MFU; None: MFU is not shown
    """

    unit = "tokens"

    def __init__(self, model, text, config, device="cpu", compile=False, peak_flops=None,
                 parallel=None, progress=True):  # fmt: skip
        self.text, self.config = text, config
        self.peak_flops, self.shape = peak_flops, model.config
        self.n_ctx = model.config.n_ctx
        self.units_per_step = config.batch * self.n_ctx
        adamw = partial(torch.optim.AdamW, lr=config.lr, betas=config.betas, fused=True)
        super().__init__(model, config, config, adamw, device, compile, parallel, progress)

    def fit(self, until=None):
        self.held_out_batch()  # refuses now what it would refuse after the last step
        return super().fit(until)

    def next_batch(self):
        config = self.config
        batch = batch_at(self.text.train, self.steps_done, config.batch, self.n_ctx, config.seed)
        return self.parallel.batch(*batch)

    def loss_sum(self, inputs, targets):
        with self.autocast():
            return self.forward(inputs, targets, "sum")

    def held_out_batch(self):
        window = held_out_batch(self.text.held_out, self.config.eval_batch, self.n_ctx)
        return self.parallel.batch(*window)

    @torch.no_grad()
    def evaluate(self):
        """The mean loss on the held-out windows, in nats per token, alike on all ranks."""
        inputs, targets = (self.to_device(x) for x in self.held_out_batch())
        count = self.parallel.token_count(targets)

        def loss_sum(x, y):  # not self.forward: it would compile once more, without autograd
            with self.autocast():
                return self.model(x, y, "sum")

        self.model.eval()
        total = self.parallel.forward_only(loss_sum, inputs, targets, self.config.micro_batch)
        self.model.train()
        return (self.parallel.total(total) / count).item()

    def shown(self):
        if not self.peak_flops:
            return super().shown()
        used = self.flops_per_token * self.history.speed[-1] / self.peak_flops
        return {**super().shown(), "MFU": f"{used:.1%}"}

    @property
    def flops_per_token(self):
        return transformer_flops(self.shape, 1, self.n_ctx) / self.n_ctx
