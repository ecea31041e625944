"""The exercises and predictions of lab 10, in the order of the lab."""

from ranklab import context_parallel as cp
from ranklab.checks.context_parallel.memory import MEMORY
from ranklab.checks.context_parallel.merge import MERGE
from ranklab.checks.context_parallel.predictions import PREDICTIONS
from ranklab.checks.context_parallel.ring import (
    check_ring_attention, check_ring_attention_backward,
)
from ranklab.checks.context_parallel.shards import check_shard_documents, check_zigzag_shard
from ranklab.checks.context_parallel.ulysses import check_ulysses_attention
from ranklab.checks.exercise import Exercise

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    MEMORY, MERGE,
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
