"""Context parallelism: each rank has some tokens of every sequence, and attention meets all keys.

    block.py      online_softmax_merge, block_attention: attention over some of the keys
    ring.py       ring_attention: keys and values go round
    ulysses.py    ulysses_attention: tokens are traded for heads

Those three are the idea. Then:
    shard.py      zigzag_shard, shard_documents: which rank has which tokens
"""
