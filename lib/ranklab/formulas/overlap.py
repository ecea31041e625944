"""When computation hides communication: the bounds that decide a layout, derived in the labs.

Assumptions: a number takes 2 bytes (bf16), a ring of many ranks sends a tensor once or twice
((R-1)/R is 1), and a GPU computes `flops` FLOP/s while it sends `bandwidth` bytes/s. A product of T
tokens with P parameters takes 2 T P FLOPs in forward and 4 T P in backward.
Source: reasoning as in Austin et al. 2025, How to Scale Your Model, "Training"
"""

import math


def largest_data_parallel(tokens, flops, bandwidth):
    """Return the most ranks for a batch of `tokens` at which backward hides the all-reduce.

    Backward takes 4 P (tokens / R) / flops seconds, the all-reduce 2 * 2 P / bandwidth.
    Lab: 03
    """
    return tokens * bandwidth / flops


def hidden_shard_tokens(flops, inside, between, gpus_per_node):
    """Return the fewest tokens per GPU at which computation hides hybrid sharding's messages.

    Shards lie inside a node, replicas on different nodes. Forward and backward hide one gather or
    reduce-scatter of 2 P bytes per 2 T P FLOPs; between nodes each GPU all-reduces its 1/N of the
    gradients during backward.
    inside, between: bytes/s of a GPU's links in its node, and to other nodes.
    Lab: 07
    """
    return flops * max(1 / inside, 1 / (gpus_per_node * between))


def largest_tensor_parallel(width, flops, bandwidth):
    """Return the number of tensor ranks whose sums take as long as their products, in forward.

    A layer has 12 width^2 parameters: 24 T width^2 FLOPs over R ranks. Its two all-reduces send
    2 * 2 * 2 T width bytes.
    Lab: 08
    """
    return 3 * width * bandwidth / flops


def micro_batches_for(stages, idle, virtual=1):
    """Return the number of micro-batches at which 1F1B's bubble is the share `idle` of the time.

    idle: a share between 0 and 1; virtual: stages on each rank.
    Lab: 09
    """
    return (stages - 1) * (1 - idle) / (virtual * idle)


def cheapest_tensor_parallel(width, gpus, tokens):
    """Return the number of tensor ranks at which a step sends least; the other axis is FSDP.

    For each layer a step sends gathers and reduce-scatters of 3 * 2 * 12 width^2 / tp bytes, and
    four all-reduces of x, 4 * 2 * 2 * width tokens * tp / gpus bytes.
    tokens: of the global batch. All links have the same bandwidth.
    Lab: 12
    """
    return math.sqrt(4.5 * width * gpus / tokens)
