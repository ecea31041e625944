"""A Llama of transformers, created on the meta device, filled in shards; and its FineTuner."""

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from ranklab.basics.targets import IGNORE
from ranklab.data.instructions import Bytes, as_batch
from ranklab.engine import device
from ranklab.fsdp.pretrained import rows_by_name, rows_in
from ranklab.projects.hugging_face import offline_transformers
from ranklab.trainer import History, Trainer

PRELOAD = ("transformers.trainer", "transformers.models.llama.modeling_llama")  # for launch


def on_meta(shape, folder, recompute):
    """Return (a model on the meta device, its tokenizer, its rows as fill_shards takes them).

    They come from a Hugging Face folder, or are new, with this shape.
    """
    transformers = offline_transformers()
    config, tokenizer = transformers.LlamaConfig(**shape), Bytes()
    rows = rows_by_name(config.initializer_range)
    if folder:
        config, rows = transformers.AutoConfig.from_pretrained(folder), rows_in(folder)
        if any(Path(folder).glob("tokenizer*")):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if recompute:
        model.activation_checkpointing_enable()  # by its default not a reentrant one
    return model, tokenizer, rows


def make_buffers(model):
    """Compute the rotary angles: they are not parameters, so no shard holds them."""
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config).to(device())


class Score(NamedTuple):
    """The score on the held-out examples, equal on all ranks."""

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
        """Reset to step 0 of a training run on these pairs; keep the weights."""
        self.config = self.loop = self.schedule = config
        self.encoded, self.steps_done, self.history = encoded, 0, History()
        self.optimizer.state.clear()

    def next_batch(self):
        """Return the next pairs in order, starting over at the end."""
        n, first = self.config.batch, self.steps_done * self.config.batch
        pairs = [self.encoded[i % len(self.encoded)] for i in range(first, first + n)]
        tokens, labels = as_batch(pairs, self.config.n_ctx)
        self.answers = count_of(labels)  # of all ranks: no rank has to ask
        return self.parallel.batch(tokens, labels)

    def logits(self, tokens):  # (B, T) -> (B, T, V)
        """Compute logits without a mask: padding follows the answer, and attention is causal."""
        return self.forward(input_ids=tokens, use_cache=False).logits

    def loss_sum(self, tokens, labels):
        return self.sum_of(self.logits(tokens), labels, self.answers)

    def sum_of(self, logits, labels, count):
        """Return this rank's loss sum for the loop: masked_loss is R times its part of the mean."""
        return self.loss(logits, labels, count) * count / self.parallel.ranks

    @torch.no_grad()
    def evaluate(self):
        """Return the Score, from one forward on every rank.

        Greedy decoding gives the right answer exactly if each of its tokens is the likeliest one
        after the right ones before it.
        """
        count = count_of(self.held_out[1])

        def sums(tokens, labels):
            logits, targets = self.logits(tokens), labels[:, 1:]
            right = (logits[:, :-1].argmax(-1) == targets) | (targets == IGNORE)
            return torch.stack([self.sum_of(logits, labels, count), right.all(1).sum()])

        batch = (self.to_device(x) for x in self.parallel.batch(*self.held_out))
        self.model.eval()
        totals = self.parallel.forward_only(sums, *batch, self.loop.micro_batch)
        self.model.train()
        loss, exact = self.parallel.total(totals).tolist()
        return Score(loss / count, exact / len(self.held_out[0]))


def count_of(labels):
    """Return how many labels count towards the loss."""
    return int((labels[:, 1:] != IGNORE).sum())
