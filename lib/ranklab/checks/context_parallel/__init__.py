"""The exercises and predictions of lab 10, in the order of the lab."""

from ranklab import context_parallel as cp
from ranklab.checks.context_parallel.memory import check_attention_memory
from ranklab.checks.context_parallel.merge import check_online_softmax_merge
from ranklab.checks.context_parallel.predictions import PREDICTIONS
from ranklab.checks.context_parallel.ring import (
    check_ring_attention, check_ring_attention_backward,
)
from ranklab.checks.context_parallel.shards import check_shard_documents, check_zigzag_shard
from ranklab.checks.context_parallel.ulysses import check_ulysses_attention
from ranklab.checks.exercise import Exercise

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    Exercise(cp.attention_memory, check_attention_memory, hints=(
        "Which tensors does backward need, and for how many tokens does a rank have them?",
        "q and the result have n_head heads, k and v n_kv_head. lse is a float32 for each query "
        "and head. If the probabilities are kept, the result and lse are not needed.",
        "qkv = (n_head + 2 * n_kv_head) * head_size * tokens // ranks * element; then "
        "n_head * tokens // ranks * (head_size * element + 4), or n_head * tokens**2 * element",
    )),
    Exercise(cp.online_softmax_merge, check_online_softmax_merge, hints=(
        "Each out is a sum of exp(score) v, divided by its own sum of exp(score). What factor "
        "turns that into a division by the sum of both?",
        "lse is the logarithm of a sum of exp. torch.logaddexp adds two such sums without an "
        "overflow. The weight of each out is exp(its lse - the new lse).",
        "total = torch.logaddexp(lse, other_lse); weights (lse - total).exp().nan_to_num(0.0), "
        "with unsqueeze(-1); return the weighted sum and total",
    )),
    Exercise(cp.ring_attention, check_ring_attention, hints=(
        "Whose block does a rank have in step 0, in step 1, in step i?",
        "R steps: start the hop of the block, attend to the block, merge, wait for the next one. "
        "After the last step nothing is passed on.",
        "hop = Hop(block, group) if step < R - 1 else None; out, lse = online_softmax_merge(out, "
        "lse, *block_attention(q, *block, visible[(rank - step) % R])); block = hop and hop.wait()",
    )),
    Exercise(cp.ring_attention_backward, check_ring_attention_backward, hints=(
        "dq stays on its rank. Which ranks know a part of dk and dv of one block?",
        "As in forward, with block_gradients. The gradients of a block travel with it: each rank "
        "adds its own to what comes, and passes the sum on. Where are they after R steps?",
        "gradients = torch.stack([dk, dv]) of this block; if grad_hop: gradients += grad_hop.wait()"
        "; grad_hop = Hop(gradients, group); after the loop dk, dv = grad_hop.wait()",
    )),
    Exercise(cp.zigzag_shard, check_zigzag_shard, hints=(
        "Token i sees i + 1 keys. How can you pair parts of the sequence, so that all pairs have "
        "the same number of keys?",
        "The r-th part from the front and the r-th from the end, of 2R parts.",
        "head, tail = torch.arange(tokens).view(2, ranks, -1); torch.cat([head, tail.flip(0)], "
        "dim=1)",
    )),
    Exercise(cp.ulysses_attention, check_ulysses_attention, hints=(
        "No head needs another head. What must a rank have to compute some of them?",
        "Cut the heads (dim 1), join the tokens (dim 2); the result goes the other way.",
        "q, k, v = (Trade.apply(x, 1, 2, group) for x in (q, k, v)); return "
        "Trade.apply(attend(q, k, v), 2, 1, group)",
    )),
    Exercise(cp.shard_documents, check_shard_documents, hints=(
        "How much work is a document of n tokens? Which one alone is more than a rank's share?",
        "Cut the long ones into 2R parts, an early and a late one for each rank. The others, "
        "longest first, go whole to the rank with the least work that has room.",
        "Keep for each rank the room that is left and the pairs that it has. If no rank has room "
        "for a whole document, fill the rank with the most room, and go on with the rest. Of a "
        "document that is cut, deal the first n % (2 * ranks) tokens one by one.",
    )),
)
