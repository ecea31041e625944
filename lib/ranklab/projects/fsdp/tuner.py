"""FineTuner: the course's training loop, fed with answers, for a model of transformers in shards."""

import functools
from typing import NamedTuple

import torch

from ranklab.checkpoint import SameRun, Together
from ranklab.engine import device
from ranklab.fsdp import Precision, fill_shards, hybrid_shard_groups, whole_bytes
from ranklab.fsdp.training import FullyShard
from ranklab.models.gpt import IGNORE
from ranklab.projects.fsdp import fsdp2, llama
from ranklab.trainer import Trainer

PRECISIONS = {"fp32": Precision(), "bf16": Precision(torch.bfloat16, torch.float32)}


class Score(NamedTuple):
    """What a model is worth on the held-out examples, alike on all ranks."""

    loss: float  # nats per token of an answer
    exact: float  # share of the examples whose answer is right to the last token


class FineTuner(Trainer):
    """A causal language model, trained on what `batch_at` gives.

    batch_at  (step) -> the batch of all ranks: (tokens, labels)
    held_out  (tokens, labels), as many rows as the ranks divide
    loss      masked_loss, or a learner's own
    """

    unit = "examples"

    def __init__(self, model, settings, batch_at, held_out, loss, parallel, progress):
        self.settings, self.batch_at, self.held_out = settings, batch_at, held_out
        self.loss, self.units_per_step = loss, settings.batch
        adamw = functools.partial(torch.optim.AdamW, lr=settings.lr, betas=settings.betas,
                                  fused=True)
        super().__init__(model, settings, settings, adamw, device(), parallel=parallel,
                         progress=progress)

    def next_batch(self):
        tokens, labels = self.batch_at(self.steps_done)
        self.answers = count_of(labels)  # of all ranks, so nobody has to ask
        return self.parallel.batch(tokens, labels)

    def logits(self, tokens):  # (B, T) -> (B, T, V)
        """Without a mask: zeros stand only after an answer, where no token before sees them."""
        return self.forward(input_ids=tokens, use_cache=False).logits

    def loss_sum(self, tokens, labels):
        return self.sum_of(self.logits(tokens), labels, self.answers)

    def sum_of(self, logits, labels, count):
        """masked_loss is R times a part of a mean; the loop wants this rank's sum."""
        return self.loss(logits, labels, count) * count / self.parallel.ranks

    def step(self, batch=None):
        """A step as the loop does it. A loss that is no number ends the run on all ranks, before
        such weights are saved: one all-reduce of 4 bytes.
        """
        share = super().step(batch)
        loss = self.parallel.total(share).item()
        if not abs(loss) < float("inf"):
            raise ValueError(f"the loss of step {self.steps_done} is {loss}: go on from a "
                             f"checkpoint before it, with less than lr={self.settings.lr:g}")
        return share

    @torch.no_grad()
    def evaluate(self):
        """The Score. An answer that is written token by token is right exactly if each token is the
        likeliest one after those before it: one forward pass tells, and all ranks make as many.
        """
        count, found = count_of(self.held_out[1]), torch.zeros(2, device=self.device)
        mine = [self.to_device(x).split(self.loop.micro_batch)
                for x in self.parallel.batch(*self.held_out)]
        self.model.eval()
        for tokens, labels in zip(*mine):
            logits = self.logits(tokens)
            wanted = labels[:, 1:]
            right = (logits[:, :-1].argmax(-1) == wanted) | (wanted == IGNORE)
            found += torch.stack([self.sum_of(logits, labels, count), right.all(1).sum()])
        self.model.train()
        loss, exact = self.parallel.total(found).tolist()
        return Score(loss / count, exact / len(self.held_out[0]))

    def saved(self):
        what = SameRun(batch=self.settings.batch, seed=self.settings.seed)
        return {**super().saved(), "run": what}


def count_of(labels):
    """Of labels that some logits are for."""
    return int((labels[:, 1:] != IGNORE).sum())


def new_tuner(config, settings, parts, held_out, progress, batch_at, rows):
    """The FineTuner of a model in shards; `rows` says which numbers it begins with, see fill_shards.
    No rank has the whole model at any time.
    """
    model = llama.on_meta(config, settings.recompute)
    most = settings.most_bytes or whole_bytes(model, model.model.layers)
    blocks = parts.policy(model, most)
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    how = {"blocks": lambda _: blocks, "precision": PRECISIONS[settings.precision],
           "offload": settings.offload}
    if settings.engine == "fsdp2":
        parallel, fill = fsdp2.Fsdp2(settings.shard_ranks, **how), fsdp2.fill
    else:
        groups = hybrid_shard_groups(settings.shard_ranks) if settings.shard_ranks else None
        parallel = FullyShard(groups=groups, block=parts.block, clip=parts.clip, **how)
        fill = fill_shards
    numbers = sum(p.numel() for p in model.parameters())
    trainer = FineTuner(model, settings, batch_at, held_out, parts.loss, parallel, progress)
    trainer.blocks, trainer.numbers = sizes, numbers
    with Together(parallel, device()).agreed():
        fill(model, rows)
    llama.make_buffers(model, device())
    return trainer
