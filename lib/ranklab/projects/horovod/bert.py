"""A BERT for texts, fine-tuned with Horovod's API: what each rank runs, for projects.horovod.

Read `fine_tune`, BertTrainer and parallel.py: with `import horovod.torch as hvd` instead
of ours it is the same script.
"""

import contextlib
import statistics
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from ranklab.data.labelled_text import Words, bag_of_words, labelled_file, python_functions
from ranklab.options import check_options, existing_folder, option
from ranklab.projects.hugging_face import is_here, offline_transformers  # noqa: F401
from ranklab.projects.horovod.parallel import HorovodParallel, counted, rank_device
from ranklab.trainer import PRECISIONS, LoopConfig, Schedule, Trainer

NO_TRANSFORMERS = (
    "transformers is not here. After pip install -c constraints.txt -e '.[hf]' this runs: "
    "python -m ranklab.projects.horovod"
)
PRELOAD = ("transformers.trainer", "transformers.models.bert.modeling_bert")  # for launch
COMPRESSIONS = ("none", "fp16")


@dataclass(frozen=True)
class FineTuning:
    """What to train and how; checked when it is made. The defaults suit two CPU cores."""

    weights: str | None = option(None, "a folder with a BERT's weights and tokenizer",
                                 kind=existing_folder)
    n_ctx: int = option(32, "tokens of a text", least=1)
    # The next four are those of the BERT that begins from scratch.
    vocab_size: int = option(4000, least=1)
    width: int = option(64, least=1)
    n_layer: int = option(2, least=1)
    n_head: int = option(2, least=1)
    steps: int = option(60, "of the optimizer", least=1)
    batch: int = option(96, "texts in a step, over all ranks", least=1)
    lr: float = option(8e-3, "the highest learning rate", least=0)
    warmup: float = option(0.1, "of all steps", least=0)
    compression: str = option("none", "of gradients on the wire", COMPRESSIONS)
    precision: str = option("fp32", "bf16, fp16: by autocast", PRECISIONS)
    seed: int = option(0, "of weights and order", least=0)

    def __post_init__(self):
        check_options(self)
        if self.width % self.n_head:
            raise ValueError(f"n_head={self.n_head} must divide width={self.width}")

    def loop(self):
        """The LoopConfig: a step is one piece, and nothing is clipped."""
        return LoopConfig(self.batch, 0.01, 0.0, self.precision, log_every=10)

    def schedule(self):
        return Schedule(self.lr, max(1, round(self.warmup * self.steps)), self.steps)

    def check(self, ranks, texts=None):
        """The mean over ranks of their means is that of the batch only where all have as many."""
        if self.batch % ranks:
            raise ValueError(f"{ranks} ranks must divide batch={self.batch}")
        if texts is not None and texts < self.batch:
            raise ValueError(f"batch={self.batch} is more than the {texts} texts to train on")


@dataclass(frozen=True)
class Tokens:
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
        tokenizer = Words(text.train, config.vocab_size)
        pad, vocab_size = tokenizer.PAD, tokenizer.vocab_size

        def encode(texts):
            return tokenizer.encode(texts, config.n_ctx)

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


def loss_of(model, tokens, rows):
    """The mean loss over these rows of the training texts."""
    x, y = tokens.train[rows].to(model.device), tokens.train_labels[rows].to(model.device)
    return model(input_ids=x, attention_mask=(x != tokens.pad).long(), labels=y).loss


def my_rows(step, config, n, rank, ranks):
    """The texts of this rank in this step: all ranks together have the same for any number."""
    epoch, place = divmod(step * config.batch, n - n % config.batch)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(config.seed + epoch))
    return order[place : place + config.batch][rank::ranks]


class BertTrainer(Trainer):
    """The course's training loop, fed with this rank's texts, for a BERT."""

    unit = "texts"

    def __init__(self, hvd, tokens, config, compress=None):
        self.hvd, self.tokens, self.config = hvd, tokens, config
        self.units_per_step, self.counts = config.batch, None
        torch.manual_seed(config.seed + hvd.rank())  # elsewhere on each rank, until the broadcast
        model = make_bert(config, len(tokens.classes), tokens.vocab_size, tokens.pad)
        super().__init__(model.train(), config.loop(), config.schedule(),  # saved ones are in eval
                         partial(torch.optim.AdamW, lr=config.lr, fused=True), rank_device(hvd),
                         parallel=HorovodParallel(hvd, config.compression, compress),
                         progress=False)

    def next_batch(self):
        tokens = self.tokens
        rows = my_rows(self.steps_done, self.config, len(tokens.train), self.parallel.rank,
                       self.parallel.ranks)
        return tokens.train[rows], tokens.train_labels[rows]

    def loss_sum(self, x, labels):  # (B/R, T), (B/R,)
        with self.autocast():
            logits = logits_of(self.forward, x, self.tokens.pad)
        return F.cross_entropy(logits.float(), labels, reduction="sum")  # (B/R, K)

    def step(self, batch=None):
        # One step is counted: all are alike, and counting takes time.
        count = counted(self.hvd) if self.steps_done == 0 else contextlib.nullcontext(self.counts)
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
    speeds = [speed for speed in history.speed if speed]
    return model, {
        "losses": history.loss, "accuracy": accuracy,
        "ms_per_step": 1e3 * config.batch / statistics.median(speeds) if speeds else float("nan"),
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
