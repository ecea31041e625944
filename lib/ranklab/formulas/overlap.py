"""From where on computing hides the messages: the bounds that decide a layout, derived in the labs.

One number takes 2 bytes (bf16), a ring of many ranks sends a tensor once or twice ((R-1)/R is 1),
and a GPU computes at `flops` FLOP/s while it sends `bandwidth` bytes/s. A product of T tokens with
P parameters takes 2 T P FLOPs in forward and 4 T P in backward.
Source: the same reasoning as Austin et al. 2025, How to Scale Your Model, "Training"
"""

import math


def largest_data_parallel(tokens, flops, bandwidth):
    """Return how many ranks a batch of `tokens` feeds, so that backward hides the all-reduce.

    Backward takes 4 P (tokens / R) / flops seconds, the all-reduce 2 * 2 P / bandwidth.
    Lab: 03
    """
    return tokens * bandwidth / flops


def hidden_shard_tokens(flops, inside, between, gpus_per_node):
    """Return from how many tokens a GPU on computing hides what hybrid sharding sends.

    Shards lie inside a node, replicas between nodes. Forward and backward each hide one gather or
    reduce-scatter of 2 P bytes for 2 T P FLOPs; between nodes each GPU sums up its 1/N of the
    gradients during backward.
    inside, between: bytes/s of a GPU's links in its node, and to other nodes.
    Lab: 07
    """
    return flops * max(1 / inside, 1 / (gpus_per_node * between))


def largest_tensor_parallel(width, flops, bandwidth):
    """Return how many tensor ranks take as long for their sums as for their products, in forward.

    A layer has 12 width^2 parameters: 24 T width^2 FLOPs over R ranks. Its two all-reduces send
    2 * 2 * 2 T width bytes.
    Lab: 08
    """
    return 3 * width * bandwidth / flops


def micro_batches_for(stages, idle, virtual=1):
    """Return the micro-batches at which 1F1B's bubble is this share of the time.

    idle: the share, between 0 and 1; virtual: stages on each rank.
    Lab: 09
    """
    return (stages - 1) * (1 - idle) / (virtual * idle)


def cheapest_tensor_parallel(width, gpus, tokens):
    """Return the tensor ranks at which a step sends least; the other axis shards (FSDP).

    Each layer and step: gathers and reduce-scatters of 3 * 2 * 12 width^2 / tp bytes, and four
    all-reduces of x, 4 * 2 * 2 * width tokens * tp / gpus.
    tokens: of the global batch. All links have one bandwidth.
    Lab: 12
    """
    return math.sqrt(4.5 * width * gpus / tokens)
