"""The vocabulary over several ranks: embedding, head and loss, without whole logits on any rank.

The number of ranks need not divide the embedding's rows, which are split as in lab 00 (ranks).
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ranklab.basics.targets import IGNORE
from ranklab.ranks import shard_range
from ranklab.tensor_parallel.regions import copy_to_region, reduce_from_region
from ranklab.tensor_parallel.split import ShardSpec, take


def vocab_parallel_embedding(tokens, w_shard, vocab_size, group=None, leave=reduce_from_region):
    """Look up tokens in an embedding of which this rank has only the rows `w_shard`.

    These are the rows shard_range(vocab_size, rank, R).
    Shape: tokens (B, T), w_shard (V/tp, C) -> (B, T, C).
    Cost: what leave sends: one all-reduce of the result, not of the embedding.
    Lab: 08
    """
    rows = shard_range(vocab_size, dist.get_rank(group), dist.get_world_size(group))
    mask = (tokens < rows.start) | (tokens >= rows.stop)
    x = F.embedding((tokens - rows.start).masked_fill(mask, 0), w_shard)
    return leave(x.masked_fill(mask[..., None], 0), group)


def vocab_parallel_cross_entropy(logits, targets, vocab_size, group=None):
    """Compute the loss of each target, in nats, from logits whose columns are split over ranks.

    The loss is 0 where a target is IGNORE, and is computed in float32. All ranks get the same
    losses, and each gets the gradient of its own logits, which are not modified.
    Shape: logits (n, V/tp), targets (n,) -> (n,).
    Cost: 12 bytes a target in two all-reduces, 4 and 8; nothing in backward.
    Paper: Shoeybi et al. 2019, Megatron-LM, section 3
    Lab: 08
    """
    rows = shard_range(vocab_size, dist.get_rank(group), dist.get_world_size(group))
    logits = logits.float()
    largest = logits.detach().amax(-1)  # (n,)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    logits = logits - largest[:, None]  # so that exp is never infinite
    mask = (targets < rows.start) | (targets >= rows.stop)
    index = (targets - rows.start).masked_fill(mask, 0)
    target_logit = logits.gather(1, index[:, None])[:, 0].masked_fill(mask, 0)
    sums = torch.stack([logits.exp().sum(-1), target_logit])  # (2, n): one message
    total, target_logit = reduce_from_region(sums, group)
    return (total.log() - target_logit).masked_fill(targets == IGNORE, 0)


def vocabulary_split(vocab_size, group=None):
    """Make the ShardSpec of an embedding's rows.

    Raises: ValueError for more ranks than rows.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    if vocab_size < R:
        raise ValueError(f"tp={R} ranks are more than vocab_size={vocab_size} rows")
    rows = shard_range(vocab_size, rank, R)
    return ShardSpec(0, vocab_size, ((rows.start, rows.stop),), (1,))


class VocabParallelEmbedding(nn.Module):
    """Look up tokens in `embedding`, of which this rank has some rows."""

    def __init__(self, embedding, group=None, leave=reduce_from_region,
                 embed=vocab_parallel_embedding):  # fmt: skip
        super().__init__()
        self.group, self.vocab_size = group, embedding.num_embeddings
        self.leave, self.embed = leave, embed
        self.weight = take(embedding.weight, vocabulary_split(self.vocab_size, group))

    def forward(self, tokens):
        return self.embed(tokens, self.weight, self.vocab_size, self.group, self.leave)


class VocabParallelHead(nn.Module):
    """Compute this rank's columns of the logits of `linear`; they are never gathered.

    Shape: (B, T, C) -> (B, T, V/tp).
    """

    def __init__(self, linear, group=None, enter=copy_to_region):
        super().__init__()
        self.group, self.enter = group, enter
        split = vocabulary_split(linear.out_features, group)
        self.weight, self.bias = take(linear.weight, split), take(linear.bias, split)

    def forward(self, x):
        return F.linear(self.enter(x, self.group), self.weight, self.bias)


def vocab_parallel_loss(vocab_size, group=None, cross_entropy=vocab_parallel_cross_entropy):
    """Make GPT's `loss`, (head, hidden, targets, reduction) -> loss, for a VocabParallelHead."""
    return functools.partial(_loss, vocab_size, group, cross_entropy)


def _loss(vocab_size, group, cross_entropy, head, hidden, targets, reduction="mean"):
    targets = targets.flatten()
    total = cross_entropy(head(hidden).flatten(0, 1), targets, vocab_size, group).sum()
    return total / (targets != IGNORE).sum() if reduction == "mean" else total
