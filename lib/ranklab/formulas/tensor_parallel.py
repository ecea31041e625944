"""The bytes that tensor parallelism sends, computed before it is run."""


def summed_bytes(C, tokens, blocks, embedding=True, head=True, sequence_parallel=False, size=4,
                 leaving=4, pieces=1):  # fmt: skip
    """Count the bytes that tensor ranks add up, forward and backward, for these tokens of a GPT.

    An all-reduce sends 2 (R-1)/R of them. x is summed four times in each block, once after the
    embedding and once before the head; 12 bytes for each target. Sequence parallelism does each sum
    in two halves, which count as one here, and adds up gradients of norms.
    C: the width of the GPT.
    embedding, head: whether they are among these layers.
    size: bytes of a number of x.
    leaving: the same where a layer puts it out: autocast has 2 there, and 4 elsewhere.
    pieces: micro-batches; each sends gradients of norms.
    """
    x = tokens * C
    norms = pieces * (2 * blocks + head) * C * 4 * sequence_parallel
    return (2 * blocks * x * (size + leaving) + x * size * (embedding + head)
            + 12 * tokens * head + norms)
