"""The bytes that a rank holds and sends, by formulas; the time of a step, by alpha and beta."""

from ranklab.baseline import transformer_flops
from ranklab.formulas.tensor_parallel import summed_bytes
from ranklab.pipeline_parallel.stages import gpt_costs, split_stages
from ranklab.projects.pipeline_parallel.training import parameters
from ranklab.ranks import shard_range


def held_bytes(shape, method, ranks):
    """Count the bytes of rank 0's parameters, gradients and Adam's moments, in float32."""
    C, L, V = shape.n_embd, shape.n_layer, shape.vocab_size
    if method == "naive":
        return 16 * parameters(shape, split_stages(gpt_costs(shape), ranks)[:1])
    split = 12 * C * C * L / ranks + len(shard_range(V, 0, ranks)) * C
    return 16 * (split + (2 * L + 1) * C)


def traffic(shape, batch, ranks, method="tensor", pieces=1, sequence_parallel=False,
            size=4, leaving=4):  # fmt: skip
    """Count (messages, bytes) that rank 0 sends in a step of `pieces` micro-batches.

    Tensor parallelism: see summed_bytes. Naive: the hidden states, and the gradient of the matrix
    shared by embedding and head. The norm of all gradients: one more all-reduce, of 8 bytes.
    """
    C, L, tokens = shape.n_embd, shape.n_layer, batch * shape.n_ctx
    ring = 2 * (ranks - 1)  # messages of an all-reduce, each of 1/R of its bytes
    if method == "naive":
        is_cut = ranks > 1
        return (ring + is_cut * (pieces + 1),
                ring / ranks * 8 + is_cut * (tokens + shape.vocab_size) * C * size)
    sums = pieces * (4 * L + 2 + 2 + (2 * L + 1) * sequence_parallel) + 1
    nbytes = summed_bytes(C, tokens, L, sequence_parallel=sequence_parallel, size=size,
                          leaving=leaving, pieces=pieces)
    return ring * sums, ring / ranks * (nbytes + 8)


def step_seconds(shape, batch, ranks, link, peak):
    """Predict the seconds of a tensor-parallel step in bf16.

    `peak`: FLOP/s of each rank
    link: the Link of the ring's average step
    """
    messages, nbytes = traffic(shape, batch, ranks, size=2, leaving=2)
    computing = transformer_flops(shape, batch, shape.n_ctx) / peak / ranks
    return computing + messages * link.alpha + nbytes * link.beta
