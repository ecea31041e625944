"""The loss of instruction tuning: on answers only, with equal weight for each of their tokens."""

import torch.distributed as dist
import torch.nn.functional as F

from ranklab.basics.targets import IGNORE


def masked_loss(logits, labels, count=None, group=None):
    """R times this rank's share of the mean loss over all answer tokens of the batch, in nats.

    The mean of these losses over ranks is the loss of the whole batch, and the mean of their
    gradients is its gradient, also where a rank has more answer tokens than another, or none. A
    label is the token itself at its own place, or IGNORE; logits at a place are for the token after
    it. Added up in float32; what is given stays as it is. `group` is the ranks over which gradients
    are averaged, R its size.
    shape  logits (B, T, V), labels (B, T) -> ()
    count  of labels that count in the whole batch, where it is known: with several micro-batches
           that of all of them; None: that of these labels on all ranks
    cost   one all-reduce of 8 bytes; nothing with `count`
    error  ValueError on every rank where no label of the batch counts
    lab    07
    """
    targets = labels[:, 1:].flatten()
    if count is None:
        count = (targets != IGNORE).sum()
        dist.all_reduce(count, group=group)
    if count == 0:
        raise ValueError("no token of this batch is an answer: there is nothing to learn from it")
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=IGNORE,
                            reduction="sum")
    return dist.get_world_size(group) * total / count
