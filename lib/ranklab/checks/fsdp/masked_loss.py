"""masked_loss: compared with the mean over all answer tokens in one process."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.basics.targets import IGNORE
from ranklab.checks.prover import ALL, GROUPS, AtMost, Proof, Slip, Stage, must_refuse
from ranklab.engine import device
from ranklab.fsdp import masked_loss
from ranklab.meter import Traffic

T, V = 151, 7  # tokens in a row, and words
# Of each rank, in 2 x T tokens; and the first label of a row, which is none. They are 281, which
# is rounded in bfloat16, and too much for 8 bits. In another turn there are others.
ANSWERS = (5, 0, 263, 13), (9, 0, 100, 30)


class Case(NamedTuple):
    """pieces: micro-batches, with `count` given; 0: a whole batch, without `count`."""

    dtype: str = "float32"
    pieces: int = 0
    turn: int = 0

    def __str__(self):
        return f"logits in {self.dtype}" + f", {self.pieces} micro-batches, `count` given" * bool(
            self.pieces)

    def batch(self, rank):
        random = torch.Generator().manual_seed(rank + 9 * self.turn)
        logits = 3 * torch.randn(2, T, V, generator=random)
        labels = torch.randint(V, (2, T), generator=random)
        counts = torch.arange(2 * T - 2).view(2, T - 1) < self.answers(rank)
        labels[:, 1:] = torch.where(counts, labels[:, 1:], IGNORE)
        return (logits.to(device(), getattr(torch, self.dtype)).requires_grad_(),
                labels.to(device()))

    def answers(self, rank):
        return ANSWERS[self.turn][rank]


class Nothing(NamedTuple):
    """No label of the batch counts."""

    count: int | None

    def __str__(self):
        return "no label of the batch counts" + f", count={self.count}" * (self.count is not None)


CASES = (Case(), Case(turn=1), Case("float16"), Case("bfloat16"), Case(pieces=2), Nothing(None),
         Nothing(0))
LOSS, GRADIENT, ERROR = "the loss", "the gradient of the logits", "what it raises"
CALLS, BYTES = "all-reduces and other calls", "bytes in them"


def _see(fn, case, ranks):
    if isinstance(case, Nothing):
        logits, labels = Case().batch(dist.get_rank())
        with Traffic() as traffic:
            error = must_refuse(fn, logits, torch.full_like(labels, IGNORE), case.count,
                                **ranks.keywords)
        yield {ERROR: error,
               CALLS: AtMost(len(traffic.ops), int(case.count is None))}
        return
    logits, labels = case.batch(dist.get_rank())
    count = sum(map(case.answers, ranks.members)) if case.pieces else None
    with Traffic() as traffic:
        losses = [fn(*piece, count, **ranks.keywords) for piece in zip(
            logits.chunk(case.pieces or 1), labels.chunk(case.pieces or 1))]
    loss = sum(each.float() for each in losses)
    if loss.requires_grad:  # ranks need not wait for each other
        loss.sum().backward()
    yield {LOSS: loss, GRADIENT: logits.grad, "the logits afterwards": logits,
           "the labels afterwards": labels, CALLS: AtMost(len(traffic.ops), int(not case.pieces)),
           BYTES: AtMost(sum(op.payload_bytes for op in traffic.ops), 8 * (not case.pieces))}


def in_one_place(logits, labels, count=None, group=None):
    """Take the log-probability of each label separately, and count on one rank."""
    at, after = (labels[:, 1:] != IGNORE).nonzero(as_tuple=True)
    if count is None:
        counts = [None] * dist.get_world_size(group)
        dist.all_gather_object(counts, len(at), group=group)
        count = sum(counts)
    if not count:
        raise ValueError("no answer")
    logs = logits.float().log_softmax(-1)[at, after, labels[at, after + 1]]
    return -logs.sum() * dist.get_world_size(group) / count


SUM, COUNTED = "dist.all_reduce(count, group=group)", "(targets != IGNORE).sum()"
TARGETS, LOGITS = "labels[:, 1:].flatten()", "logits[:, :-1].flatten(0, 1).float()"
RETURN = "return dist.get_world_size(group) * total / count"
ASKS, EMPTY, TOTAL = "    if count is None:\n", "if count == 0:", "    total = F"
NO_ANSWER = "    if not (targets != IGNORE).any():\n"
KEEP = "The caller still needs its labels: don't write into them."
OWN = "(targets != IGNORE).sum().clamp(min=1)"
MASKED = Proof(
    masked_loss,
    Stage({"R times each rank's share of the mean over all answer tokens, and its gradients; one "
           "rank has none; logits of float16 and bfloat16 are summed in float32": (),
           "micro-batches by `count`, which sends nothing; in groups of 1, 2 and 3": (CALLS, BYTES),
           "a batch without any answer is a ValueError on every rank": (ERROR,)},
          _see, CASES, (4,), (ALL, *GROUPS), oracle=in_one_place),
    mistakes=(
        Slip("This averages the ranks' own means over tokens: divide by the count over all ranks, "
             "not by this rank's.",
             (SUM, "count = count.clamp(min=1)", RETURN, "return total / count"),
             ('"sum"', '"mean"', RETURN, "return total.nan_to_num()"),
             (RETURN, f"return total / {OWN}")),
        Slip("The loss is divided by this rank's count alone: dist.all_reduce(count, group=group) "
             "adds up the counts of all ranks.",
             (SUM, "count = count.clamp(min=1)")),
        Slip("The mean over no answers is NaN: take the sum, and divide by the count of all ranks.",
             ('"sum"', '"mean"', RETURN, RETURN.replace("total", f"total * {COUNTED}")),
             ('"sum"', '"mean"', RETURN, "return total"), ('"sum"', '"mean"')),
        Slip("Ranks are averaged later, so return R times this rank's share.",
             (RETURN, "return total / count"), (RETURN, "return total / int(count)")),
        Slip("This adds up the losses of all ranks: each must return its own share, and the mean "
             "over ranks comes later.",
             (RETURN, "of_all = total.detach().clone()\n    dist.all_reduce(of_all, group=group)\n"
                      "    return of_all / count + (total - total.detach()) / count")),
        Slip("Logits predict the next token: pair logits[:, :-1] with labels[:, 1:].",
             (TARGETS, "labels.flatten()", "logits[:, :-1]", "logits"),
             ("logits[:, :-1]", "logits[:, 1:]"),
             (TARGETS, "labels[:, :-1].flatten()", "logits[:, :-1]", "logits[:, 1:]"),
             (TARGETS, "labels[:, :-1].flatten()")),
        Slip("A row does not continue in the next one: shift within each row, then flatten().",
             (TARGETS, "labels.flatten()[1:]", LOGITS, "logits.flatten(0, 1)[:-1].float()")),
        Slip("The first label of a row does not count: no logits predict it.",
             (COUNTED, "(labels != IGNORE).sum()")),
        Slip("Masked labels do not count: labels != IGNORE.",
             (COUNTED, "(targets == targets).sum()"), (COUNTED, "targets.new_tensor(len(targets))"),
             (COUNTED, "targets.new_tensor(labels.numel())")),
        Slip("Token 0 is a token like any other: only IGNORE is masked.",
             (COUNTED, "(targets > 0).sum()")),
        Slip("The sum includes masked labels: use ignore_index=IGNORE.",
             ("ignore_index=IGNORE", "ignore_index=-1", TOTAL, f"    targets = targets.clamp(min=0)"
                                                              f"\n{TOTAL}")),
        Slip("The count is rounded: keep it as a 64-bit integer, not in the logits' dtype.",
             (COUNTED, "(targets != IGNORE).to(logits.dtype).sum()"),
             (SUM, f"count = count.to(logits.dtype)\n        {SUM}")),
        Slip(KEEP, (TOTAL, f"    labels[labels == IGNORE] = 0\n{TOTAL}"),
             ("    targets =", "    labels[:, 0] = IGNORE\n    targets =")),
        Slip("The caller still needs its logits: don't write into them.",
             ("    targets =", "    logits.data[labels == IGNORE] = 0\n    targets =")),
        Slip("`count` already covers all ranks: don't add it up over ranks again.",
             (ASKS, "    if count is not None:\n        count = torch.tensor(count)\n"
                    f"        {SUM}\n{ASKS}")
             , torch=torch),
        Slip("If `count` is given, divide by it: it covers all micro-batches.",
             (ASKS, "    if True:\n")),
        Slip("The loss is rounded to 16 bits: use logits.float() before the loss, and return the "
             "loss in float32.",
             (LOGITS, LOGITS.removesuffix(".float()")),
             (RETURN, f"{RETURN[:7]}({RETURN[7:]}).to(logits.dtype)")),
        Slip("Pass `group` to the all-reduce.", ("(count, group=group)", "(count)")),
        Slip("R is the size of the group: dist.get_world_size(group).",
             ("dist.get_world_size(group)", "dist.get_world_size()")),
        Slip("With no answers at all, there is nothing to learn from: raise a ValueError.",
             (EMPTY, "if False:"),
             (EMPTY, "if False:", RETURN, f"{RETURN[:7]}({RETURN[7:]}).nan_to_num()")),
        Slip("A rank without answers must return a loss of 0 with a graph, the sum of no losses, "
             "so that its backward runs.",
             (TOTAL, f"{NO_ANSWER}        return 0.0 * count\n{TOTAL}")),
        Slip("The logits get no gradient from the loss: detach neither the logits nor the loss.",
             (RETURN, f"{RETURN[:7]}({RETURN[7:]}).detach()"),
             (RETURN, f"{RETURN[:7]}({RETURN[7:]}).detach() + 0 * total"),
             (LOGITS, LOGITS.replace("logits", "logits.detach()"))),
        Slip("It is an error only if no rank has an answer: check the count over all ranks.",
             (TOTAL, f"{NO_ANSWER}        raise ValueError('no')\n{TOTAL}")),
        Slip("All ranks must call the all-reduce, even one without an answer.",
             (ASKS, f"{NO_ANSWER}        return 0 * logits.float().sum()\n{ASKS}")),
        Slip("A given count can be 0, too: test `if count is None`.",
             (ASKS, "    if not count:\n")),
        Slip("logits[:, :-1] is not contiguous, so view() fails: use flatten(0, 1).",
             (LOGITS, "logits[:, :-1].view(-1, logits.shape[-1]).float()")),
        Slip("Send only one number: the count.",
             (SUM, f"{SUM}\n        dist.barrier(group=group)"),
             (SUM, f"count = count.repeat(2)\n        {SUM}\n        count = count[0]")),
    ), hints=(
        "Ranks have different numbers of answers. What must all of them divide by?",
        "Sum the losses of this rank's answers, divide by the count of all ranks, and multiply by "
        "R, because the mean over ranks follows. Shift first: logits[:, :-1] and labels[:, 1:].",
        "targets = labels[:, 1:].flatten(); count = (targets != IGNORE).sum(); dist.all_reduce("
        "count, group=group); F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, "
        "ignore_index=IGNORE, reduction=\"sum\") * dist.get_world_size(group) / count",
    ))
