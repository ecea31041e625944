"""Context parallelism: each rank has some tokens of every sequence; its queries attend to all keys.

    block.py      online_softmax_merge, block_attention: attention over some keys, block by block
    ring.py       ring_attention: keys and values go around a ring
    ulysses.py    ulysses_attention: trade tokens for heads

Those three are the idea. Then:
    shard.py      zigzag_shard, shard_documents: which rank has which tokens
    tiled.py      tiled_logits_loss: the loss of a long sequence, without all its logits at once
    seconds.py    layer_seconds of both kinds; formulas/context_parallel.py has their bytes
    training.py   ContextParallel: the training loop's view

Context ranks have different tokens of the same rows, and hold the same weights. So for the weights
they are data-parallel ranks (data_parallel).
"""

from ranklab.context_parallel.block import (
    block_attention, block_gradients, causal_blocks, online_softmax_merge,
)
from ranklab.context_parallel.ring import (
    Hop, context_attention, ring_attention, ring_attention_backward,
)
from ranklab.context_parallel.seconds import layer_seconds
from ranklab.context_parallel.shard import (
    begins_of, contiguous_shard, refuse_uneven, shard_documents, zigzag_shard,
)
from ranklab.context_parallel.tiled import logits_memory, mlp_memory, tiled_logits_loss
from ranklab.context_parallel.training import ContextParallel, TokenShard
from ranklab.context_parallel.ulysses import Trade, ulysses_attention
from ranklab.formulas.context_parallel import attention_memory, ring_bytes, ulysses_bytes

__all__ = [
    "ContextParallel", "Hop", "TokenShard", "Trade", "attention_memory", "begins_of",
    "block_attention", "block_gradients", "causal_blocks", "context_attention", "contiguous_shard",
    "layer_seconds", "logits_memory", "mlp_memory", "online_softmax_merge", "refuse_uneven",
    "ring_attention", "ring_attention_backward", "ring_bytes", "shard_documents",
    "tiled_logits_loss", "ulysses_attention", "ulysses_bytes", "zigzag_shard",
]
