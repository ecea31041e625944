"""What attention keeps and sends: bytes of one layer on one rank."""


def attention_memory(tokens, n_head, n_kv_head, head_size, ranks=1, element=2, keeps_scores=False):
    """Count the bytes that attention keeps for backward, on each rank that shares a sequence.

    These are q, k, v, the output, and a float32 for each query and head. With keeps_scores, count
    plain attention on one rank: q, k, v, and in each head the probabilities of all token pairs.
    element  bytes per number: 2 for bf16
    Raises: ValueError if the ranks do not divide the tokens, or for keeps_scores on several ranks.
    Lab: 10
    """
    if tokens % ranks:
        raise ValueError(f"{ranks} ranks must divide the {tokens} tokens of a sequence")
    if keeps_scores and ranks > 1:
        raise ValueError(f"ranks={ranks} must be 1 where whole rows of scores are kept")
    share = tokens // ranks
    qkv = (n_head + 2 * n_kv_head) * head_size * share * element
    if keeps_scores:
        return qkv + n_head * tokens * tokens * element
    return qkv + n_head * share * (head_size * element + 4)


def ring_bytes(tokens, n_kv_head, head_size, ranks, element=2, backward=True):
    """Count the bytes that a rank sends for one sequence in ring attention.

    k and v are sent R - 1 times in forward and R - 1 times in backward; their gradients are sent R
    times in backward, in float32 (in Transformer Engine in the dtype of k and v).
    """
    if ranks == 1:
        return 0
    numbers = 2 * n_kv_head * head_size * (tokens // ranks)
    forward = (ranks - 1) * numbers * element
    return forward + backward * (forward + ranks * numbers * 4)


def ulysses_bytes(tokens, n_head, n_kv_head, head_size, ranks, element=2, backward=True):
    """Count the bytes that a rank sends for one sequence: q, k, v and the result.

    The part that the rank keeps is not counted.
    """
    numbers = 2 * (n_head + n_kv_head) * head_size * (tokens // ranks)
    return (1 + backward) * numbers * element * (ranks - 1) // ranks
