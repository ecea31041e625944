"""The check of masked_loss: beside the mean over all answer tokens in one process."""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from ranklab.basics.targets import IGNORE
from ranklab.checks.beside import beside, expect, on_groups, refused
from ranklab.checks.failures import LEFT
from ranklab.engine import device
from ranklab.meter import Traffic

T = 151  # tokens in a row
# Of each rank, in 2 x T tokens; and the first label of a row, which is none. They are 281, which
# is rounded in bfloat16, and too much for 8 bits.
ANSWERS = 5, 0, 263, 13
CASES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
         "micro-batches with count": torch.float32}
KEEP = "The caller needs its logits and labels again: write nothing into them."
FAILURES = {
    "(RuntimeError: element 0 of tensors does not require grad|.*the loss is nan).*":
        "Without answers the loss is a sum of nothing, with a graph and without NaN.",
    LEFT: "All ranks must call the all-reduce, also one that has no answer.",
    "RuntimeError: view size is not .*": "logits[:, :-1] is not contiguous: flatten(0, 1).",
    ".*(LongTensor|the logits is|the labels is).*": KEEP,
    "ValueError: .*": "It is an error only where no rank has an answer: look at the count over all "
    "ranks, or the `count` that is given.",
    ".*with count.* is 1/. of what is right": "`count` counts all ranks already: don't add it up "
                                              "over ranks again.",
    ".* is 1/. of what is right": "The ranks are averaged later, so return R times this rank's "
                                  "share.",
    ".*its gradient is .*": "The sum must stay in the graph.",
}
LOSS = ("R * the sum over this rank's answers / the count of all, added up in float32. In each row "
        "logits[:, :-1] are for labels[:, 1:]. A count is an integer of 64 bits.")


def _batch(rank, dtype):
    torch.manual_seed(rank)
    logits, labels = 3 * torch.randn(2, T, 7), torch.randint(7, (2, T))
    labels[:, 1:][torch.arange(2 * T - 2).view(2, T - 1) >= ANSWERS[rank]] = IGNORE
    return logits.to(dtype).to(device()).requires_grad_(), labels.to(device())


def _trained(loss_of, rank, dtype, pieces=1):
    """What comes out of the rank's batch in so many micro-batches, and the batch itself."""
    logits, labels = _batch(rank, dtype)
    loss = sum(loss_of(*piece).float() for piece in zip(logits.chunk(pieces), labels.chunk(pieces)))
    loss.backward()
    return {"the loss": loss.detach(), "its gradient": logits.grad, "the logits": logits,
            "the labels": labels}


def _trial(masked_loss, ranks):
    rank, R, count = dist.get_rank(), ranks.size, sum(ANSWERS[r] for r in ranks.members)
    for case, dtype in CASES.items():
        given, pieces = (count, 2) if "count" in case else (None, 1)
        learner_loss = partial(masked_loss, count=given, group=ranks.group)
        each = [_trained(lambda x, y: R * _total(x[:, :-1], y[:, 1:]) / count, r, dtype)
                for r in ranks.members]
        right = {name: [of_rank[name] for of_rank in each] for name in each[0]}
        slips = _slips(right["the loss"][ranks.index] * count / R, rank, R, dtype, count)
        yield from beside(f"{case}, {ranks}", ranks, lambda turn: _trained(
            learner_loss, rank, dtype, pieces), lambda turn: right, advice=lambda name: LOSS,
            slips=lambda name, turn: slips, sends=(pieces % 2, 8 * (pieces % 2)))
    logits, labels = _batch(0, dtype)
    for given in (None, 0):
        with Traffic() as traffic:
            look = refused(f"no label of the batch counts, count={given}, {ranks}", partial(
                masked_loss, logits, torch.full_like(labels, IGNORE), given, ranks.group))
        yield look
    yield partial(expect, not traffic.ops, f"with count=0 it sends {len(traffic.ops)} messages",
                  "Ask the ranks only `if count is None`: 0 is a count that is given, too.")


def _slips(total, rank, R, dtype, count):
    unshifted = _total(*_batch(rank, dtype)).detach()
    return {
        "the mean of this rank's own tokens": (
            total / max(ANSWERS[rank], 1), "A mean of means: divide by the count of all ranks."),
        "the mean over all places": (
            total / (2 * T - 2), "Masked ones do not count: labels != IGNORE."),
        "without the shift": (R * unshifted / (count + 2 * R), "Logits are for the token after: "
                              "logits[:, :-1] and labels[:, 1:]."),
        "divided by a wrong count": (R * total / (count + 2 * R), "The first label of a row does "
                                     "not count: no logits are for it."),
    }


def _total(logits, labels):
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE,
                         reduction="sum")


def check_masked_loss(masked_loss):
    on_groups(_trial, masked_loss, failures=FAILURES)
    yield "R times each rank's share of the mean over all answer tokens; one rank has none"
    yield "the gradients too; logits of float16 and bfloat16 are summed in float32"
    yield "micro-batches by `count`, which sends nothing; in groups of 1, 2 and 3"
    yield "a batch without any answer is a ValueError on every rank"
