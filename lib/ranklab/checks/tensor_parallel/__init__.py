"""The exercises and predictions of lab 08, in the order of the lab.

    inputs.py         a layer on ranks, compared with the layer in one process
    regions.py        copy_to_region, reduce_from_region
    linear.py         ColumnParallelLinear, RowParallelLinear
    attention.py      parallel_attention
    vocabulary.py     vocab_parallel_cross_entropy, vocab_parallel_embedding
    norm.py           sequence_parallel_norm
    dropout_seeds.py  dropout_seeds
"""

from ranklab.checks.clinic import bugs
from ranklab.checks.tensor_parallel.attention import ATTENTION
from ranklab.checks.tensor_parallel.dropout_seeds import DROPOUT_SEEDS
from ranklab.checks.tensor_parallel.linear import COLUMN, ROW
from ranklab.checks.tensor_parallel.norm import NORM
from ranklab.checks.tensor_parallel.predictions import PREDICTIONS as NUMBERS
from ranklab.checks.tensor_parallel.regions import COPY, REDUCE
from ranklab.checks.tensor_parallel.vocabulary import EMBEDDING, LOSS

__all__ = ["EXERCISES", "PREDICTIONS"]

BUGS = "wide_layer",
EXERCISES = (COPY, REDUCE, COLUMN, ROW, ATTENTION, LOSS, EMBEDDING, NORM, DROPOUT_SEEDS,
             *bugs.exercises(*BUGS))
PREDICTIONS = (*NUMBERS, *bugs.predictions(*BUGS))
