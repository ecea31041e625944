"""The loss of instruction tuning: on answers only, with equal weight for each of their tokens."""

import torch.distributed as dist
import torch.nn.functional as F

from ranklab.basics.targets import IGNORE


def masked_loss(logits, labels, count=None, group=None):
    """Return R times this rank's share of the mean loss over all answer tokens, in nats.

    The mean of these losses over ranks is the loss of the whole batch, and the mean of their
    gradients is its gradient, even if ranks have different numbers of answer tokens, or none. Each
    label is the token at its own position, or IGNORE; the logits at a position predict the next
    token. Accumulated in float32; the inputs stay unchanged.
    `group`: the ranks over which gradients are averaged; R is its size.
    Shape: logits (B, T, V), labels (B, T) -> ().
    count: how many labels count in the whole batch (with several micro-batches: in all of them), if
        this is known; None: count these labels on all ranks.
    Cost: one all-reduce of 8 bytes; none with `count`.
    Raises: ValueError on every rank if no label of the batch counts.
    Lab: 07
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
