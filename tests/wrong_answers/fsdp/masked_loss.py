"""Lab 07: what goes wrong in the loss of instruction tuning."""

import torch
from mutants import mutant

from ranklab.fsdp import masked_loss

SUM = "dist.all_reduce(count, group=group)"
SHIFTED = "labels[:, 1:].flatten()"
LOGITS = "logits[:, :-1].flatten(0, 1).float()"
RETURN = "return dist.get_world_size(group) * total / count"
EMPTY = "if count == 0:"


def _wrong(*edits, says, **named):
    return mutant(masked_loss, *edits, says=says, **named)


WRONG = [
    _wrong(SUM, "count = count.clamp(min=1)", RETURN, "return total / count",
           says="A mean of means"),
    _wrong('"sum"', '"mean"', RETURN, RETURN.replace("total", "total * (targets != IGNORE).sum()"),
           says="without NaN"),
    _wrong('"sum"', '"mean"', RETURN, "return total.nan_to_num()", says="A mean of means",
           called="means_without_nan"),
    _wrong(RETURN, "return total / count", says="R times this rank's share"),
    _wrong(SHIFTED, "labels.flatten()", "logits[:, :-1]", "logits", says="for the token after"),
    _wrong("logits[:, :-1]", "logits[:, 1:]", says="are for labels",
           called="shifted_the_wrong_way"),
    _wrong("(targets != IGNORE)", "(labels != IGNORE)", says="The first label of a row"),
    _wrong("(targets != IGNORE).sum()", "(targets == targets).sum()",
           says="Masked ones do not count"),
    _wrong("(targets != IGNORE).sum()", "(targets != IGNORE).to(logits.dtype).sum()",
           says="an integer of 64 bits"),
    _wrong("    targets =", "    labels[:, 0] = IGNORE\n    targets =", called="writes_one_label",
           says="write nothing into them"),
    _wrong("    if count is None:", "    if count is not None:\n        count = torch.tensor(count)"
           "\n        dist.all_reduce(count, group=group)\n    if count is None:", torch=torch,
           says="`count` counts all ranks"),
    _wrong("    total =", "    labels[labels == IGNORE] = 0\n    total =",
           says="write nothing into them"),
    _wrong(LOGITS, "logits[:, :-1].flatten(0, 1)", says="added up in float32"),
    _wrong("(count, group=group)", "(count)", says="Pass `group` on"),
    _wrong("dist.get_world_size(group)", "dist.get_world_size()",
           says="Pass `group` on", called="size_of_the_world"),
    _wrong(EMPTY, "if False:", says="no label of the batch counts.* no ValueError",
           called="no_error"),
    _wrong("    if count is None:\n        count =", "    if True:\n        count =",
           says="or the `count` that is given", called="count_is_not_used"),
    _wrong("    total =", "    if not (targets != IGNORE).any():\n        return 0 * count\n"
           "    total =", says="with a graph"),
    _wrong(RETURN, f"{RETURN[:7]}(dist.get_world_size(group) * total / count).detach() + 0 * total",
           says="stay in the graph"),
    _wrong("    total =", "    if not (targets != IGNORE).any():\n        raise ValueError('no')\n"
           "    total =", says="raised ValueError", called="an_error_on_one_rank"),
    _wrong("if count is None:", "if not count:", says="with count=0 it sends 1 messages"),
]
