"""How much a training step computes, and what fraction of the device's peak that is.

One multiply and one add are two FLOPs, so an (m, k) @ (k, n) product costs 2 m k n.
Norms, GELU, softmax and the like are left out: together below 2% of the FLOPs at any common width.
"""


def transformer_flops(config, batch, seq, backward=True):
    """Count the FLOPs of all matrix products in one step of GPT(config) on `batch` x `seq` tokens.

    Attention counts in full, including its masked half, as in torch's counter and most papers.
    Paper: Kaplan et al. 2020, section 2.1; PaLM 2022, appendix B
    Lab: 01
    """
    C, V, tokens = config.n_embd, config.vocab_size, batch * seq
    weights = 12 * C * C  # q, k, v, out: 4 C^2; the MLP's two matrices: 8 C^2
    attention = 2 * seq * C  # per token: q @ k and probability @ v, each seq x C over all heads
    forward = 2 * tokens * (config.n_layer * (weights + attention) + C * V)
    return 3 * forward if backward else forward  # backward: once for inputs, once for weights


def mfu(config, tokens_per_second, peak_flops, devices=1):
    """Return the model FLOPs per second as a fraction of the devices' peak FLOP/s.

    Recomputation, done to save memory, does not count.
    Paper: PaLM 2022, appendix B
    Lab: 01
    """
    flops_per_token = transformer_flops(config, 1, config.n_ctx) / config.n_ctx
    return flops_per_token * tokens_per_second / (peak_flops * devices)
