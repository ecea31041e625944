"""Tensor parallelism: each layer split over ranks, as in Megatron-LM.

    regions.py     copy_to_region and reduce_from_region, f and g; the same pair for sharded tokens
    linear.py      ColumnParallelLinear, RowParallelLinear
    attention.py   parallel_attention: some heads on each rank, also with grouped queries

Those three are the idea. Then:
    split.py       which part of a parameter a rank holds
    vocabulary.py  vocab_parallel_embedding, vocab_parallel_cross_entropy
    sequence.py    sequence_parallel_norm: some tokens on each rank outside the regions
    dropout.py     dropout_seeds
    plan.py        changing a model from outside, by the names of its modules
    training.py    TensorParallel: the training loop's view

formulas/tensor_parallel.py has summed_bytes: what tensor ranks add up.

Rows of the vocabulary are sharded as in lab 00 (ranks). The tests compare ours with torch's and
Megatron's (peers/dtensor, peers/megatron).
"""

from ranklab.formulas.overlap import largest_tensor_parallel
from ranklab.tensor_parallel import plan
from ranklab.tensor_parallel.attention import KeyValueHeads, enter_before, parallel_attention
from ranklab.tensor_parallel.dropout import SPREAD, dropout_seeds, own_random
from ranklab.tensor_parallel.linear import (
    ColumnParallelLinear, OverlappedColumnLinear, RowParallelLinear,
)
from ranklab.tensor_parallel.plan import TPConfig, parallel_gpt, tensor_parallel
from ranklab.tensor_parallel.regions import (
    RegionFunction, all_reduce_sum, copy_to_region, identity, reduce_from_region,
)
from ranklab.tensor_parallel.sequence import sequence_parallel_norm
from ranklab.tensor_parallel.split import split_parameter
from ranklab.tensor_parallel.vocabulary import (
    vocab_parallel_cross_entropy, vocab_parallel_embedding,
)

__all__ = [
    "ColumnParallelLinear", "KeyValueHeads", "OverlappedColumnLinear", "RegionFunction",
    "RowParallelLinear", "SPREAD", "TPConfig", "all_reduce_sum", "copy_to_region", "dropout_seeds",
    "enter_before", "identity", "largest_tensor_parallel", "own_random", "parallel_attention",
    "parallel_gpt", "plan", "reduce_from_region", "sequence_parallel_norm", "split_parameter",
    "tensor_parallel", "vocab_parallel_cross_entropy", "vocab_parallel_embedding",
]
