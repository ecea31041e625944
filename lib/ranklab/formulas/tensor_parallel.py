"""Predict the bytes that tensor parallelism sends."""


def summed_bytes(C, tokens, blocks, embedding=True, head=True, sequence_parallel=False, size=4,
                 leaving=4, pieces=1):  # fmt: skip
    """Count the bytes that tensor ranks sum for `tokens` tokens of a GPT, forward and backward.

    An all-reduce sends 2 (R-1)/R of them. x is summed four times in each block, once after the
    embedding and once before the head; each target adds 12 bytes. Sequence parallelism splits each
    sum into two halves, which count as one here, and also sums the gradients of norms.
    C: the width of the GPT.
    embedding, head: whether these layers are included.
    size: bytes of a number of x.
    leaving: bytes of a number in a layer's output: 2 under autocast, which has 4 elsewhere.
    pieces: micro-batches; each sends gradients of norms.
    """
    x = tokens * C
    norms = pieces * (2 * blocks + head) * C * 4 * sequence_parallel
    return (2 * blocks * x * (size + leaving) + x * size * (embedding + head)
            + 12 * tokens * head + norms)
