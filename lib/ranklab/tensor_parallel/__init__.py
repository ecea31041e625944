"""Tensor parallelism: each layer split over ranks, as in Megatron-LM.

    regions.py     copy_to_region and reduce_from_region, f and g; and their pair for tokens
    linear.py      ColumnParallelLinear, RowParallelLinear
    attention.py   parallel_attention: some heads on each rank, also of grouped queries

Those three are the idea. Then:
    split.py       which part of a parameter a rank holds
    vocabulary.py  vocab_parallel_embedding, vocab_parallel_cross_entropy
    sequence.py    sequence_parallel_norm: some tokens on each rank outside of the regions
    dropout.py     dropout_seeds
    plan.py        a model changed from outside, by the names of its modules
    training.py    TensorParallel: the training loop's view

Rows of the vocabulary are sharded as in lab 00 (ranks). The tests hold ours, torch's
and Megatron's together (peers/dtensor, peers/megatron).
"""

from ranklab.tensor_parallel.attention import parallel_attention
from ranklab.tensor_parallel.dropout import dropout_seeds
from ranklab.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from ranklab.tensor_parallel.plan import TPConfig, parallel_gpt, tensor_parallel
from ranklab.tensor_parallel.regions import copy_to_region, reduce_from_region
from ranklab.tensor_parallel.sequence import sequence_parallel_norm
from ranklab.tensor_parallel.vocabulary import (
    vocab_parallel_cross_entropy, vocab_parallel_embedding,
)

__all__ = [
    "ColumnParallelLinear", "TPConfig", "RowParallelLinear", "copy_to_region", "dropout_seeds",
    "parallel_attention", "parallel_gpt", "reduce_from_region",
    "sequence_parallel_norm", "tensor_parallel", "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
]
