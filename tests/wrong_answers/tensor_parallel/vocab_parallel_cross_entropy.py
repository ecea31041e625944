"""Lab 08: what goes wrong in a loss of which each rank has some columns."""

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from mutants import mutant

from ranklab.basics.targets import IGNORE
from ranklab.tensor_parallel import vocab_parallel_cross_entropy

LARGEST = "    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)\n"
ROWS = "shard_range(vocab_size, dist.get_rank(group), dist.get_world_size(group))"
AT = "(targets - rows.start).masked_fill(mask, 0)"
OF_TARGET = "logits.gather(1, index[:, None])[:, 0].masked_fill(mask, 0)"
SUM = "reduce_from_region(sums, group)"
END = ".masked_fill(targets == IGNORE, 0)"


def _wrong(*edits, says, **named):
    return mutant(vocab_parallel_cross_entropy, *edits, says=says, torch=torch, **named)


WRONG = [
    _wrong(LARGEST, "", says="subtract the largest logit of all ranks"),
    _wrong("logits = logits - largest[:, None]", "logits = logits - 0 * largest[:, None]",
           says="sum of exp is infinite"),
    _wrong(END, "", says="not 0 where a target is IGNORE", called="ignore_counts"),
    _wrong(OF_TARGET, "logits.gather(1, index[:, None])[:, 0]", says="both over all ranks"),
    _wrong("logits = logits.float()", "logits = logits * 1", says="in float32|not torch.float32"),
    _wrong(SUM, "torch.distributed.nn.all_reduce(sums, group=group or dist.group.WORLD)",
           says="passes it on as it is: reduce_from_region|backward sends"),
    _wrong("logits.detach().amax(-1)", "logits.detach().amax(-1).clamp(min=0)",
           says="whatever its sign"),
    _wrong("return (total.log() - target_logit)", "return (total.log() - target_logit - largest)",
           says="also from the target's"),
    _wrong("total.log() - target_logit", "total.log()", says="minus the target's logit"),
    _wrong("return (total", "return -(total", says="is negative"),
    _wrong(SUM, "sums", says="that of this rank's columns", called="its_own_columns"),
    _wrong(ROWS, "range((n := vocab_size // dist.get_world_size(group)) * dist.get_rank(group), "
           "n * (dist.get_rank(group) + 1))", says="shard_range"),
    _wrong(AT, "targets - rows.start", says="may be another rank's"),
    _wrong("logits - largest[:, None]", "logits.sub_(largest[:, None])", says="is changed|in-place",
           called="in_place"),
    _wrong(SUM, "reduce_from_region(sums)", LARGEST, LARGEST.replace(", group=group", ""),
           says="Pass `group` on"),
    _wrong("    mask =", "    targets[targets == IGNORE] = 0\n    mask =",
           says="targets is changed"),
    _wrong("logits.exp().sum(-1)", "logits.exp().sum(-1).detach()", says="softmax over all ranks"),
]


def vocab_parallel_cross_entropy__gathers_the_logits(logits, targets, vocab_size, group=None):
    """bytes a target in 1 messages"""
    R, rank = dist.get_world_size(group), dist.get_rank(group)
    most = -(-vocab_size // R)
    padded = F.pad(logits.detach().float(), (0, most - logits.shape[1]), value=float("-inf"))
    parts = [torch.empty_like(padded) for _ in range(R)]
    dist.all_gather(parts, padded.contiguous(), group=group)
    parts = [p[:, : vocab_size // R + (r < vocab_size % R)] for r, p in enumerate(parts)]
    parts[rank] = logits.float()
    return F.cross_entropy(torch.cat(parts, 1), targets, reduction="none", ignore_index=IGNORE)


def vocab_parallel_cross_entropy__gathers_three_numbers(logits, targets, vocab_size, group=None):
    """What is gathered grows with the ranks"""
    R, rank = dist.get_world_size(group), dist.get_rank(group)
    each, more = divmod(vocab_size, R)
    start, logits = rank * each + min(rank, more), logits.float()
    is_mine = (targets >= start) & (targets < start + logits.shape[1])
    top = logits.detach().amax(-1)
    own = torch.stack([top, (logits - top[:, None]).exp().sum(-1), logits.gather(
        1, (targets - start).where(is_mine, 0)[:, None])[:, 0].where(is_mine, 0)])
    parts = [torch.empty_like(own) for _ in range(R)]
    dist.all_gather(parts, own.detach(), group=group)
    parts[rank] = own
    tops, sums, found = torch.stack(parts).unbind(1)
    highest = tops.amax(0)
    losses = (sums * (tops - highest).exp()).sum(0).log() + highest - found.sum(0)
    return losses.where(targets != IGNORE, 0)
