"""TextTrainer: the training loop for a GPT on text."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from ranklab.baseline.flops import transformer_flops
from ranklab.basics.options import option
from ranklab.data import batch_at, held_out_batch, python_text, text_file
from ranklab.data.text import check_length
from ranklab.trainer import LoopConfig, Trainer


@dataclass(frozen=True)
class TrainConfig(LoopConfig):
    """How to train; checked on creation. The defaults suit two CPU cores."""

    steps: int = option(1000, "of the optimizer", least=1)
    batch: int = option(12, "sequences in a step, over all ranks", least=1)
    lr: float = option(5e-3, "the highest learning rate", least=0)
    warmup: int = option(20, "steps to the highest learning rate", least=0)
    final_lr: float = option(0.02, "fraction of lr that is left at the end", least=0)
    betas: tuple[float, float] = (0.9, 0.95)
    seed: int = option(0, "of the order of the data", least=0)
    eval_batch: int = option(256, "held-out sequences", least=1)


def text_for(shape, config, path=None):
    """Load the file `path`, or Python's library, as a Text; fit a GPT's config to its tokens.

    Returns: (Text, the GPT's config).
    Raises: ValueError if the text is too short for the windows that `config` asks for.
    """
    text = text_file(path) if path else python_text()
    check_length(text.train, shape.n_ctx)
    held_out_batch(text.held_out, config.eval_batch, shape.n_ctx)
    if text.vocab_size > shape.vocab_size:  # odd sizes leave tensor cores idle
        shape = replace(shape, vocab_size=-(-text.vocab_size // 128) * 128)
    return text, shape


class TextTrainer(Trainer):
    """Train a GPT on a Text with AdamW in one fused kernel.

    peak_flops: peak FLOP/s of all ranks together, for MFU; None: MFU is not shown
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
        self.held_out_batch()  # refuses now, not after the last step
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
        """Return the mean loss on the held-out windows, in nats per token, the same on all ranks.
        """
        inputs, targets = (self.to_device(x) for x in self.held_out_batch())
        count = self.parallel.token_count(targets)

        def loss_sum(x, y):  # not self.forward, which would compile again, without autograd
            with self.autocast():
                return self.model(x, y, "sum")

        self.model.eval()
        total = self.parallel.forward_only(loss_sum, inputs, targets, self.config.micro_batch)
        self.model.train()
        return (self.parallel.total(total) / count).item()

    def shown(self):
        if not self.peak_flops:
            return super().shown()
        mfu = self.flops_per_token * self.history.speed[-1] / self.peak_flops
        return {**super().shown(), "MFU": f"{mfu:.1%}"}

    @property
    def flops_per_token(self):
        return transformer_flops(self.shape, 1, self.n_ctx) / self.n_ctx
