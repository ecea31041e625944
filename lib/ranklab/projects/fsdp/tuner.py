"""FineTuner: the course's training loop, fed with answers, for a model in shards."""

import functools
from typing import NamedTuple

import torch

from ranklab.basics.targets import IGNORE
from ranklab.data.instructions import as_batch
from ranklab.engine import device
from ranklab.trainer import History, Trainer


class Score(NamedTuple):
    """What a model is worth on the held-out examples, equal on all ranks."""

    loss: float  # nats per token of an answer
    exact: float  # share of the examples whose answer is right to the last token


class FineTuner(Trainer):
    """A causal language model, trained on the answers of pairs, from begin() on.

    held_out  (tokens, labels), as many rows as the ranks divide
    loss      masked_loss, or a learner's
    """

    unit = "examples"

    def __init__(self, model, config, held_out, loss, parallel, progress):
        self.held_out, self.loss, self.units_per_step = held_out, loss, config.batch
        adamw = functools.partial(torch.optim.AdamW, lr=config.lr, betas=config.betas, fused=True)
        super().__init__(model, config, config, adamw, device(), parallel=parallel,
                         progress=progress)

    def begin(self, config, encoded):
        """It stands before step 0 of a training on these pairs; the weights stay."""
        self.config = self.loop = self.schedule = config
        self.encoded, self.steps_done, self.history = encoded, 0, History()
        self.optimizer.state.clear()

    def next_batch(self):
        """The pairs come in their order, again and again."""
        n, first = self.config.batch, self.steps_done * self.config.batch
        pairs = [self.encoded[i % len(self.encoded)] for i in range(first, first + n)]
        tokens, labels = as_batch(pairs, self.config.n_ctx)
        self.answers = count_of(labels)  # of all ranks: no rank has to ask
        return self.parallel.batch(tokens, labels)

    def logits(self, tokens):  # (B, T) -> (B, T, V)
        """Without a mask: zeros stand only after an answer, and no token sees what is after it."""
        return self.forward(input_ids=tokens, use_cache=False).logits

    def loss_sum(self, tokens, labels):
        return self.sum_of(self.logits(tokens), labels, self.answers)

    def sum_of(self, logits, labels, count):
        """masked_loss is R times a part of a mean; the loop wants this rank's sum."""
        return self.loss(logits, labels, count) * count / self.parallel.ranks

    @torch.no_grad()
    def evaluate(self):
        """The Score. What a model writes token by token is right exactly if each token is the
        likeliest one after the right ones before it: one forward tells, and all ranks do as many.
        """
        count = count_of(self.held_out[1])

        def sums(tokens, labels):
            logits, wanted = self.logits(tokens), labels[:, 1:]
            right = (logits[:, :-1].argmax(-1) == wanted) | (wanted == IGNORE)
            return torch.stack([self.sum_of(logits, labels, count), right.all(1).sum()])

        mine = (self.to_device(x) for x in self.parallel.batch(*self.held_out))
        self.model.eval()
        found = self.parallel.forward_only(sums, *mine, self.loop.micro_batch)
        self.model.train()
        loss, exact = self.parallel.total(found).tolist()
        return Score(loss / count, exact / len(self.held_out[0]))


def count_of(labels):
    """Of labels that some logits are for."""
    return int((labels[:, 1:] != IGNORE).sum())
