"""The check of masked_loss: beside the mean over all answer tokens in one process."""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from ranklab.checks.beside import expect, on_groups
from ranklab.checks.failures import LEFT
from ranklab.checks.trial import explain, refuses
from ranklab.engine import device
from ranklab.meter import Traffic
from ranklab.models.gpt import IGNORE

T = 151  # tokens in a row
# Of each rank, in 2 x T tokens; and the first label of a row, which is none. They are 281, which
# is rounded in bfloat16, and too much for 8 bits.
ANSWERS = 5, 0, 263, 13
TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
CASES = "float32", "float16", "bfloat16", "micro-batches with count"
KEEP = "The caller needs its logits and labels again: write nothing into them."
NO_GRAPH = ("A rank without answers takes part in backward all the same: its loss is a sum of "
            "nothing, with a graph and without NaN.")
FAILURES = {"RuntimeError: element 0 of tensors does not require grad.*": NO_GRAPH,
            LEFT: "All ranks must call the all-reduce, also one that has no answer.",
            "RuntimeError: view size is not compatible.*": "logits[:, :-1] is not contiguous: "
            "flatten(0, 1) or reshape.",
            ".*LongTensor.*": KEEP,
            "ValueError: .*": "A rank without answers is no error where another one has some: "
            "first the count over all ranks, or the `count` that is given."}


def _batch(rank, dtype):
    torch.manual_seed(rank)
    logits, labels = 3 * torch.randn(2, T, 7), torch.randint(7, (2, T))
    labels[:, 1:][torch.arange(2 * T - 2).view(2, T - 1) >= ANSWERS[rank]] = IGNORE
    return logits.to(dtype).to(device()), labels.to(device())


def _trial(masked_loss, ranks):
    rank = dist.get_rank()
    for case in CASES:
        logits, labels = _batch(rank, TYPES.get(case, torch.float32))
        logits.requires_grad_()
        count, pieces = None, 1
        if "count" in case:
            count, pieces = sum(ANSWERS[r] for r in ranks.members), 2
        before = logits.detach().clone(), labels.clone()
        with Traffic() as traffic:
            losses = [masked_loss(*piece, count, ranks.group)
                      for piece in zip(logits.chunk(pieces), labels.chunk(pieces))]
            for loss in losses:
                loss.backward()
        loss = sum(loss.detach().float() for loss in losses)
        sent = [op.payload_bytes for op in traffic.ops]
        yield partial(expect, torch.equal(logits, before[0]) and torch.equal(labels, before[1]),
                      f"{case}, {ranks}: logits or labels are changed", KEEP)
        yield partial(_compare, case, ranks, loss.cpu(), logits.grad.cpu(), sent)
    labels[:, 1:] = IGNORE
    for count in (None, 0):
        with Traffic() as traffic:
            is_refused = refuses(masked_loss, logits, labels, count, ranks.group)
        yield partial(expect, is_refused, f"no label of the batch counts, and {ranks} gets a loss",
                      "raise ValueError(...) where the count over all ranks is 0. The first label "
                      "of a row never counts: no logits are for it.")
    yield partial(expect, not traffic.ops, f"with count=0 it sends {len(traffic.ops)} messages",
                  "A count that is given is not asked for: if count is None, since 0 is one, too.")


def check_masked_loss(masked_loss):
    on_groups(_trial, masked_loss, failures=FAILURES)
    yield "R times each rank's share of the mean over all answer tokens; one rank has none"
    yield "the gradients too; logits of float16 and bfloat16 are summed in float32"
    yield "micro-batches by `count`, which sends nothing; in groups of 1, 2 and 3"
    yield "a batch without any answer is a ValueError on every rank"


def _compare(case, ranks, loss, gradient, sent):
    where, dtype = f"{case}, {ranks}", TYPES.get(case, torch.float32)
    rank, R = dist.get_rank(), ranks.size
    calls = int("count" not in case)
    expect(calls or not sent, f"{where}: it sends {len(sent)} messages", "The count is given, that "
           "of all ranks: nobody need be asked.")
    expect(loss.isfinite(), f"{where}: the loss is {loss:.6g}", NO_GRAPH)
    count, here = sum(ANSWERS[r] for r in ranks.members), max(ANSWERS[rank], 1)
    logits, labels = (x.cpu() for x in _batch(rank, dtype))  # and now by one process
    logits.requires_grad_()
    total = cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(),
                          ignore_index=IGNORE, reduction="sum")
    [whole] = torch.autograd.grad(total, logits)
    unshifted = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    explain(f"{where}: the loss", loss, R * total / count, {
        "the mean of this rank's own tokens": (total / here, "A mean of means gives each rank the "
                                               "same weight: divide by the count of all ranks."),
        "R times too small": (total / count, "Ranks are averaged later: so R times its share."),
        "the mean over all places": (total / (2 * T - 2), "Masked ones do not count: labels != "
                                     "IGNORE."),
        "without the shift": (R * unshifted / (count + 2 * R), "Logits are for the token after: "
                              "logits[:, :-1] and labels[:, 1:]."),
        "divided by a wrong count": (R * total / (count + 2 * R), "The first label of a row does "
                                     "not count: no logits are for it."),
    }, "R * the sum over this rank's answers / the count of all, added up in float32: "
       "logits[:, :-1].float() are for labels[:, 1:], in each row, so before you flatten. A count "
       "is an integer of 64 bits.")
    explain(f"{where}: the gradient of the logits", gradient,
            (R * whole.float() / count).to(dtype), hint="The sum must stay in the graph.")
    expect(len(sent) == calls and sum(sent) <= 8,
           f"{case}: {len(sent)} messages of {sum(sent)} bytes, not {calls} of 8",
           "The count alone travels, in one all-reduce; with `count` given nothing does.")
