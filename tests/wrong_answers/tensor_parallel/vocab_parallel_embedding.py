"""Lab 08: what goes wrong in an embedding of which each rank has some rows."""

import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.tensor_parallel import vocab_parallel_embedding

ROWS = "shard_range(vocab_size, dist.get_rank(group), dist.get_world_size(group))"
MASK = "x.masked_fill(mask[..., None], 0)"
LOCAL = "(tokens - rows.start).masked_fill(mask, 0)"


def _wrong(*edits, says, **named):
    return mutant(vocab_parallel_embedding, *edits, says=says, torch=torch, **named)


WRONG = [
    _wrong(MASK, "x", says="Zeros for tokens of other ranks"),
    _wrong(LOCAL, "tokens - rows.start", says="look up any row for the others|index out of range"),
    _wrong(LOCAL, "tokens.masked_fill(mask, 0)", says="at their number - start"),
    _wrong(LOCAL, "(tokens - rows.start).clamp(0, len(rows) - 1)", MASK, "x",
           says="Zeros for tokens of other ranks", called="clamped"),
    _wrong(ROWS, "range(len(w_shard) * dist.get_rank(group), len(w_shard) * (dist.get_rank(group) "
           "+ 1))", says="shard_range"),
    _wrong(f"leave({MASK}, group)", MASK, says=r"then leave\(x, group\)"),
    _wrong(f"leave({MASK}, group)", f"reduce_from_region({MASK}, group)", says="of shape",
           called="ignores_leave"),
    _wrong(f"leave({MASK}, group)", f"leave({MASK})", says="Pass `group` on"),
    _wrong("tokens < rows.start", "tokens <= rows.start", says="number - start|rows of",
           called="one_row_too_few"),
    _wrong(LOCAL, "tokens.sub_(rows.start).masked_fill_(mask, 0)",
           says="It writes into what others read"),
    _wrong(MASK, "x.masked_fill(mask[..., None], 0).detach()", says="gradient of w_shard",
           called="detached"),
]


def vocab_parallel_embedding__gathers_the_embedding(tokens, w_shard, vocab_size, group=None,
                                                    leave=None):
    """forward sends|of shape|contiguous"""
    most = -(-vocab_size // dist.get_world_size(group))
    parts = [w_shard.new_zeros(most, w_shard.shape[1])
             for _ in range(dist.get_world_size(group))]
    padded = torch.cat([w_shard.detach(), w_shard.new_zeros(most - len(w_shard), 5)])
    dist.all_gather(parts, padded, group=group)
    lengths = [vocab_size // len(parts) + (r < vocab_size % len(parts)) for r in range(len(parts))]
    parts = [part[:length] for part, length in zip(parts, lengths)]
    parts[dist.get_rank(group)] = w_shard
    return torch.nn.functional.embedding(tokens, torch.cat(parts))
