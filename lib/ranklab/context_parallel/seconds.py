"""The time of attention: seconds of one layer, with a ring and with Ulysses."""

from ranklab.formulas.context_parallel import ring_bytes, ulysses_bytes
from ranklab.hardware import H100


def layer_seconds(tokens, n_head, n_kv_head, head_size, ranks, gpu=H100, per_node=8, efficiency=0.5,
                  alpha=10e-6):
    """Predict the seconds of one layer's causal attention in bf16, forward and backward.

    A step of the ring takes as long as its computation or its message, whichever is longer. If the
    ranks fill several nodes, a ring leaves a node through one card, and an all-to-all through all
    cards. Ulysses stops where the number of ranks no longer divides the heads of k and v. There is
    no tensor parallelism, and messages take no SMs from attention.
    ranks: a list of numbers of ranks
    Returns: {"ring": [seconds], "Ulysses": [...], "computing": [...]}, for each number of ranks.
    """
    flops = 7 * n_head * head_size * tokens**2  # half of (4 + 10) per pair: causal
    seconds = {"ring": [], "Ulysses": [], "computing": []}
    for R in ranks:
        computing = flops / R / (efficiency * gpu.bf16_flops)
        slow = R > per_node
        link = gpu.network_bandwidth if slow else gpu.nvlink_bandwidth
        forward = ring_bytes(tokens, n_kv_head, head_size, R, backward=False) / max(1, R - 1)
        messages = {1 / 3.5: forward, 2.5 / 3.5: 3 * forward}  # backward: plus float32 gradients
        seconds["ring"].append(sum(R * max(part * computing / R, alpha + nbytes / link)
                                   for part, nbytes in messages.items()))
        if n_kv_head % R == 0:
            traded = ulysses_bytes(tokens, n_head, n_kv_head, head_size, R)
            seconds["Ulysses"].append(computing + 8 * alpha + traded / link)
        seconds["computing"].append(computing)
    return seconds
