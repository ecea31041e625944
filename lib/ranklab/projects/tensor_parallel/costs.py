"""What a rank holds and sends, by formulas; the time of a step, by alpha and beta."""

from ranklab.baseline import transformer_flops
from ranklab.models.gpt import block_parameters, count_parameters
from ranklab.ranks import shard_range
from ranklab.tensor_parallel.formulas import summed_bytes


def held_bytes(shape, method, ranks):
    """Bytes of rank 0's parameters, gradients and Adam's moments, in float32."""
    C, L, V = shape.n_embd, shape.n_layer, shape.vocab_size
    if method == "naive":
        away = L - len(shard_range(L, 0, ranks))
        return 16 * (count_parameters(shape) - away * block_parameters(shape))
    split = 12 * C * C * L / ranks + len(shard_range(V, 0, ranks)) * C
    return 16 * (split + (2 * L + 1) * C)


def traffic(shape, batch, ranks, method="tensor", pieces=1, sequence_parallel=False,
            size=4, leaving=4):  # fmt: skip
    """(messages, bytes) that a rank sends in a step of `pieces` micro-batches.

    Tensor parallelism: see summed_bytes. The norm of all gradients: 8 bytes more.
    """
    C, L, tokens = shape.n_embd, shape.n_layer, batch * shape.n_ctx
    ring = 2 * (ranks - 1)  # messages of an all-reduce, each of 1/R of its bytes
    if method == "naive":
        return 2 * pieces + ring, 2 * tokens * C * size + ring / ranks * 8
    sums = pieces * (4 * L + 2 + 2 + (2 * L + 1) * sequence_parallel) + 1
    nbytes = summed_bytes(C, tokens, L, sequence_parallel=sequence_parallel, size=size,
                          leaving=leaving, pieces=pieces)
    return ring * sums, ring / ranks * (nbytes + 8)


def step_seconds(shape, batch, ranks, link, peak, size=2):
    """Seconds of a tensor-parallel step on ranks of `peak` FLOP/s, in rings as slow as `link`."""
    messages, nbytes = traffic(shape, batch, ranks, size=size, leaving=size)
    computing = transformer_flops(shape, batch, shape.n_ctx) / peak / ranks
    return computing + messages * link.alpha + nbytes * link.beta
