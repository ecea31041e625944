"""A BERT, its texts as tokens, and the trainer that feeds them to the training loop."""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ranklab.data.labelled_text import Words, bag_of_words, labelled_file, python_functions
from ranklab.engine import device
from ranklab.horovod.training import HorovodParallel
from ranklab.projects.hugging_face import offline_transformers
from ranklab.trainer import Trainer


class Tokens(NamedTuple):
    """The texts as token ids, and baselines that need no BERT."""

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
    """Read the Tokens of the file `data`, or of Python's functions.

    config.weights: a folder with the tokenizer; without weights, words of the texts are the tokens
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


def make_bert(config, tokens):
    """Make a BertForSequenceClassification, from scratch where `config` names no weights."""
    transformers, classes = offline_transformers(), len(tokens.classes)
    if config.weights:
        return transformers.AutoModelForSequenceClassification.from_pretrained(
            config.weights, num_labels=classes, ignore_mismatched_sizes=True)  # a new head
    return transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=tokens.vocab_size, hidden_size=config.width, num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head, intermediate_size=2 * config.width,
        max_position_embeddings=config.n_ctx, num_labels=classes, pad_token_id=tokens.pad,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.06))  # BERT's 0.02 is for a width of 768; few steps need no dropout


class BertTrainer(Trainer):
    """The course's training loop for a BERT, fed with this rank's texts."""

    def __init__(self, hvd, tokens, config, compression):
        self.tokens, self.config, self.units_per_step = tokens, config, config.batch
        torch.manual_seed(config.seed + hvd.rank())  # others on each rank, until the broadcast
        model = make_bert(config, tokens).train()  # a saved one is in eval
        adamw, parallel = partial(torch.optim.AdamW, fused=True), HorovodParallel(hvd, compression)
        super().__init__(model, config, config, adamw, device(), parallel=parallel, progress=False)

    def next_batch(self):
        """Return this rank's texts for this step.

        Together, the ranks have the same texts for any number of ranks.
        """
        tokens, batch, n = self.tokens, self.config.batch, len(self.tokens.train)
        epoch, first = divmod(self.steps_done * batch, n - n % batch)
        draw = torch.Generator().manual_seed(self.config.seed + epoch)
        rows = torch.randperm(n, generator=draw)[first : first + batch]
        rows = rows[self.parallel.rank :: self.parallel.ranks]
        return tokens.train[rows], tokens.train_labels[rows]

    def loss_sum(self, x, labels):  # (B/R, T), (B/R,)
        with self.autocast():
            logits = self.logits(x)  # (B/R, K)
        return F.cross_entropy(logits.float(), labels, reduction="sum")

    def logits(self, x):  # (B, T) -> (B, K)
        return self.model(input_ids=x, attention_mask=(x != self.tokens.pad).long()).logits

    def step(self, batch=None):
        with self.optimizer.skip_synchronize():  # forward_backward has waited for the averages
            return super().step(batch)

    @torch.no_grad()
    def evaluate(self, batch=256):
        """Return the share of held-out texts classified correctly: exact, equal on all ranks.

        The ranks gather their counts, so that every all-reduce in a timeline is from a step.
        Collective: call it on every rank.
        """
        of_rank = slice(self.parallel.rank, None, self.parallel.ranks)
        sides = self.tokens.held_out[of_rank], self.tokens.held_out_labels[of_rank]
        right = torch.zeros(1, dtype=torch.int64)
        self.model.eval()
        for x, y in zip(*(side.split(batch) for side in sides)):
            right += (self.logits(self.to_device(x)).argmax(1).cpu() == y).sum()
        self.model.train()
        return self.parallel.hvd.allgather(right).sum().item() / len(self.tokens.held_out)
