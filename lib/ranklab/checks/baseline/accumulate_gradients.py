"""accumulate_gradients, compared with one backward of the whole batch."""

import functools
from typing import NamedTuple

import torch

from ranklab.baseline import accumulate_gradients
from ranklab.basics.targets import IGNORE
from ranklab.checks.baseline.whole_batch import (
    batch, number_of, one_thread, told_gradients,
)
from ranklab.checks.prover import AtMost, Must, Proof, Slip, Stage
from ranklab.meter import SavedActivations
from ranklab.models.gpt import GPT, GPTConfig

TINY = GPTConfig(vocab_size=31, n_ctx=12, n_layer=1, n_head=2, n_embd=16)
LOSS = "the loss that it returned", "whether the loss holds its graph"
AFTERWARDS = "inputs afterwards", "targets afterwards"
WEIGHTS = "whether weights have changed"
PEAK = "bytes of activations at once"
AGAIN = "{}, after a second call,"


class Case(NamedTuple):
    name: str
    rows: int
    micro_batch: int
    ignored: tuple = ()  # how many targets of each row are IGNORE

    def __str__(self):
        return self.name


def _model():
    torch.manual_seed(7)
    model = GPT(TINY)  # its head is tied to its embedding
    model.norm.weight.requires_grad_(False)  # and this one is frozen
    return model


@functools.cache
def _bytes_of_piece(rows):
    inputs, targets = batch(TINY, rows, TINY.n_ctx)
    with SavedActivations(model := _model()) as saved:
        model(inputs, targets)
    return saved.bytes


def _see(fn, case):
    model, (inputs, targets) = _model(), batch(TINY, case.rows, TINY.n_ctx, case.ignored)
    weights = [p.detach().clone() for p in model.parameters()]
    shapes = []

    def loss_sum(x, y):
        shapes.append(tuple(x.shape))
        return model(x, y, "sum")

    with one_thread(), SavedActivations(model) as saved:
        loss = fn(loss_sum, inputs, targets, case.micro_batch)
    pieces = sorted(tuple(x.shape) for x in inputs.split(case.micro_batch))
    limit = 1.5 * _bytes_of_piece(min(case.rows, case.micro_batch))
    holds_graph = bool(getattr(loss, "requires_grad", False))
    yield {
        "the list of pieces that loss_sum got": Must(sorted(shapes), pieces),
        **told_gradients(model),
        **dict(zip(LOSS, (number_of(loss), Must(holds_graph, False)))),
        **dict(zip(AFTERWARDS, (inputs, targets))),
        WEIGHTS: Must(not all(map(torch.equal, model.parameters(), weights)), False),
        PEAK: AtMost(saved.peak_bytes, limit),
    }
    with one_thread():
        fn(loss_sum, inputs, targets, case.micro_batch)
    yield {AGAIN.format(name): grad for name, grad in told_gradients(model).items()}


def whole_batch(loss_sum, inputs, targets, micro_batch):
    loss = loss_sum(inputs, targets) / (targets != IGNORE).sum()
    loss.backward()
    return loss.item()


PIECES = "zip(inputs.split(micro_batch), targets.split(micro_batch))"
BACKWARD, ADDS = "loss.backward()", "mean = mean + loss.detach()"
NUMBER = "-(-len(inputs) // micro_batch)"
SUM, RETURN = "loss_sum(x, y) / count", "return mean"
DIVIDE = "Divide by the number of targets in the whole batch that are not IGNORE."
ACCUMULATE = Proof(
    accumulate_gradients,
    Stage({"equal pieces, one piece, a ragged last piece: the gradient of the whole batch": (),
           "the mean loss is returned, without its graph": LOSS,
           "gradients are added to what .grad held; inputs and weights are unchanged": (
               *AFTERWARDS, WEIGHTS, *(AGAIN.format(name) for name in told_gradients(_model()))),
           "one piece at a time is in memory": (PEAK,)},
          _see, (Case("8 rows in pieces of 2", 8, 2), Case("1 piece", 4, 9),
                 Case("9 rows in pieces of 4: the last has 1", 9, 4)),
          oracle=whole_batch, through=torch.float32),
    Stage("IGNORE targets do not count, even if some pieces have more of them than others",
          _see, (Case("6 rows in pieces of 2, some targets are IGNORE", 6, 2, (11, 9, 0, 0, 3)),
                 Case("4 rows in pieces of 1, one has nothing but IGNORE", 4, 1, (0, 0, 12))),
          oracle=whole_batch, through=torch.float32),
    mistakes=(
        Slip(f"These are the gradients of the sum. {DIVIDE}",
             (SUM, "loss_sum(x, y)"), (SUM, "loss_sum(x, y)", RETURN, "return mean / count")),
        Slip(f"You divide by the number of rows in a piece. {DIVIDE}",
             ("/ count", "/ len(x)"), ("/ count", "/ micro_batch")),
        Slip(f"You divide by the number of rows in the batch. {DIVIDE}",
             ("/ count", "/ len(inputs)")),
        Slip(f"You divide by the number of pieces. {DIVIDE}", ("/ count", f"/ {NUMBER}")),
        Slip(f"You divide by the number of tokens in a row. {DIVIDE}",
             ("/ count", "/ inputs.shape[1]")),
        Slip("Each piece gives the gradient of its own mean: divide by the count of the whole "
             "batch, not of the piece.",
             ("/ count", "/ (y != IGNORE).sum()"), ("/ count", "/ y.numel()")),
        Slip("The mean of the pieces' means gives the short last piece too much weight. Divide "
             "every piece's sum by the count of the whole batch.",
             ("/ count", f"/ (y != IGNORE).sum() / {NUMBER}"),
             ("/ count", f"/ y.numel() / {NUMBER}")),
        Slip("Targets that are IGNORE do not count: divide by (targets != IGNORE).sum(), not by "
             "the number of all targets.", ("(targets != IGNORE).sum()", "targets.numel()")),
        Slip("Don't weight by rows: pieces differ in how many targets are not IGNORE, whatever "
             "their rows. Divide each piece's sum by the count of the whole batch.",
             ("/ count", "/ (y != IGNORE).sum() * len(x) / len(inputs)")),
        Slip("The last piece was left out. It may have fewer rows than the others, and it may be "
             "the only one.",
             (PIECES, f"[p for p in {PIECES} if len(p[0]) == min(micro_batch, len(inputs))]"),
             (PIECES, f"list({PIECES})[: len(inputs) // micro_batch]"),
             (PIECES, f"list({PIECES})[:-1]")),
        Slip("split(n) makes pieces of n rows, of which the last may have fewer; chunk(n) makes up "
             "to n pieces.",
             (PIECES, PIECES.replace("split", "chunk"))),
        Slip("Cut between rows: inputs.split(micro_batch).",
             (PIECES, PIECES.replace("batch)", "batch, 1)"))),
        Slip("Each row must go through loss_sum only once, for both its gradient and the mean.",
             (ADDS, "mean = mean + loss_sum(x, y).detach() / count")),
        Slip("The whole batch is one piece here. Cut it: inputs.split(micro_batch).",
             (PIECES, "[(inputs, targets)]")),
        Slip("Call backward() on each loss.", (BACKWARD, "")),
        Slip("You call backward() only on the last piece: call it inside the loop.",
             (BACKWARD, "", RETURN, "loss.backward()\n    return mean")),
        Slip("Call backward() on each piece before the next forward: it frees what the piece kept, "
             "unless you pass retain_graph=True.",
             (BACKWARD, "", ADDS, "mean = mean + loss", RETURN,
              "mean.backward()\n    return mean.detach()"),
             (BACKWARD, "loss.backward(retain_graph=True)")),
        Slip("Add up loss.detach(), or the graph of every piece stays in memory.",
             (ADDS, "mean = mean + loss")),
        Slip("Return the mean over all targets in the whole batch that are not IGNORE.",
             (RETURN, "return mean * count"), (RETURN, f"return mean / {NUMBER}"),
             (ADDS, "mean = loss.detach()"), (RETURN, "return mean * len(inputs)")),
        Slip("Return the mean loss of the batch.", (RETURN, "")),
        Slip("Split inputs and targets; do not write into them.",
             (RETURN, "targets[targets == IGNORE] = 0\n    return mean"),
             ("    mean = 0.0", "    targets.clamp_(min=0)\n    mean = 0.0")),
    ), hints=(
        "backward() adds to .grad. What must each piece's loss be divided by so that the gradients "
        "sum to the gradient of the mean?",
        "Divide every piece by the same number: the count of targets in the whole batch that are "
        "not IGNORE.",
        "for x, y in zip(inputs.split(micro_batch), targets.split(micro_batch)): loss = "
        "loss_sum(x, y) / count; loss.backward(); add up loss.detach().",
    ))
