"""A BERT for texts, fine-tuned with Horovod's API: what each rank runs, for projects.horovod.

Read `fine_tune`, BertTrainer and parallel.py: with `import horovod.torch as hvd` instead
of ours it is the same script.
"""

import contextlib
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ranklab.data.labelled_text import Words, bag_of_words, labelled_file, python_functions
from ranklab.projects.costs import median_speed
from ranklab.projects.hugging_face import is_here, offline_transformers  # noqa: F401
from ranklab.projects.horovod.parallel import HorovodParallel, rank_device
from ranklab.trainer import Trainer

NO_TRANSFORMERS = (
    "transformers is not here. After pip install -c constraints.txt -e '.[hf]' this runs: "
    "python -m ranklab.projects.horovod"
)
PRELOAD = ("transformers.trainer", "transformers.models.bert.modeling_bert")  # for launch


class Tokens(NamedTuple):
    """The texts as numbers, and what is known of them before any training."""

    name: str
    classes: tuple[str, ...]
    train: torch.Tensor  # (N, T) int64
    train_labels: torch.Tensor  # (N,) int64
    held_out: torch.Tensor
    held_out_labels: torch.Tensor
    vocab_size: int
    pad: int
    best_constant: float  # the accuracy when the answer is always the commonest class
    bag_of_words: float  # accuracy of naive Bayes on the same tokens


def read_tokens(config, data=None):
    """The Tokens of the file `data`, or of Python's own functions; by the weights' own tokenizer
    where there are weights.
    """
    text = labelled_file(data) if data else python_functions()
    if config.weights:
        tokenizer = offline_transformers().AutoTokenizer.from_pretrained(config.weights)
        pad, vocab_size = tokenizer.pad_token_id, len(tokenizer)

        def encode(texts):
            return tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt",
                             max_length=config.n_ctx)["input_ids"]
    else:
        words = Words(text.train, config.vocab_size)
        pad, vocab_size = words.PAD, words.vocab_size
        encode = partial(words.encode, n_ctx=config.n_ctx)

    sides = (encode(text.train), text.train_labels, encode(text.held_out), text.held_out_labels)
    return Tokens(text.name, text.classes, *sides, vocab_size, pad, text.best_constant,
                  bag_of_words(*sides, pad))


def make_bert(config, classes, vocab_size, pad):
    """A BertForSequenceClassification; from scratch where `config` names no weights."""
    transformers = offline_transformers()
    if config.weights:
        return transformers.AutoModelForSequenceClassification.from_pretrained(
            config.weights, num_labels=classes, ignore_mismatched_sizes=True)  # a new head
    return transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=vocab_size, hidden_size=config.width, num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head, intermediate_size=2 * config.width,
        max_position_embeddings=config.n_ctx, num_labels=classes, pad_token_id=pad,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.06))  # BERT's 0.02 is for a width of 768; few steps need no dropout


class BertTrainer(Trainer):
    """The course's training loop, fed with this rank's texts, for a BERT."""

    unit = "texts"

    def __init__(self, hvd, tokens, config, compress=None):
        self.hvd, self.tokens, self.config = hvd, tokens, config
        self.units_per_step, self.counts = config.batch, None
        torch.manual_seed(config.seed + hvd.rank())  # others on each rank, until the broadcast
        model = make_bert(config, len(tokens.classes), tokens.vocab_size, tokens.pad)
        super().__init__(model.train(), config.loop(), config.schedule(),  # saved ones are in eval
                         partial(torch.optim.AdamW, lr=config.lr, fused=True), rank_device(hvd),
                         parallel=HorovodParallel(hvd, config.compression, compress),
                         progress=False)

    def next_batch(self):
        """This rank's texts in this step: all ranks together have the same for any number."""
        tokens, batch, n = self.tokens, self.config.batch, len(self.tokens.train)
        epoch, place = divmod(self.steps_done * batch, n - n % batch)
        draw = torch.Generator().manual_seed(self.config.seed + epoch)
        rows = torch.randperm(n, generator=draw)[place : place + batch]
        rows = rows[self.parallel.rank :: self.parallel.ranks]
        return tokens.train[rows], tokens.train_labels[rows]

    def loss_sum(self, x, labels):  # (B/R, T), (B/R,)
        with self.autocast():
            logits = logits_of(self.forward, x, self.tokens.pad)
        return F.cross_entropy(logits.float(), labels, reduction="sum")  # (B/R, K)

    def step(self, batch=None):
        # One step is counted: all are alike, and counting takes time. The real Horovod can't tell.
        is_counted = self.steps_done == 0 and hasattr(self.hvd, "counted")
        count = self.hvd.counted() if is_counted else contextlib.nullcontext(self.counts)
        # HorovodParallel.forward_backward has waited for the averages
        with count as self.counts, self.optimizer.skip_synchronize():
            return super().step(batch)

    def evaluate(self):
        return accuracy(self.hvd, self.model, self.tokens)


def logits_of(model, x, pad):  # (B, T) -> (B, K)
    return model(input_ids=x, attention_mask=(x != pad).long()).logits


def fine_tune(hvd, tokens, config, timeline=None, until=None, compress=None):
    """On one rank, after hvd.init(): the model is trained; returns it and what was seen.
    timeline  rank 0 writes Horovod's timeline of the training to this path
    until     stop after so many steps, and do not ask what they have brought
    compress  a learner's own compress_fp16
    """
    config.check(hvd.size(), len(tokens.train))
    trainer = BertTrainer(hvd, tokens, config, compress)
    model, history = trainer.model, trainer.history
    if timeline:
        hvd.start_timeline(timeline)
    trainer.fit(until)
    if timeline:
        hvd.stop_timeline()
    accuracy = trainer.evaluate() if trainer.stopped else history.held_out.get(config.steps)
    return model, {
        "losses": history.loss, "accuracy": accuracy,
        "ms_per_step": 1e3 * config.batch / median_speed(history),
        "sent_bytes": trainer.counts and trainer.counts.data.sent_bytes,
        "sizes": [p.nbytes for p in reversed(list(model.parameters()))]}  # as backward goes


@torch.no_grad()
def accuracy(hvd, model, tokens, batch=256):
    """The share of held-out texts that are classed right, the same on every rank, and exact.
    Ranks take every R-th text and add up what is right, not the means of unequal parts. They gather
    it: the all-reduces in a timeline are those of steps.
    """
    mine = slice(hvd.rank(), None, hvd.size())
    right, rows = torch.zeros(1, dtype=torch.int64), tokens.held_out[mine].split(batch)
    model.eval()
    for x, y in zip(rows, tokens.held_out_labels[mine].split(batch)):
        x, y = x.to(model.device), y.to(model.device)
        right += (logits_of(model, x, tokens.pad).argmax(1) == y).sum().cpu()
    model.train()
    return hvd.allgather(right).sum().item() / len(tokens.held_out)
