"""Which experts a token goes to, how many tokens an expert takes, and what keeps the loads even.

Tokens are in sequences, (..., T, ...), and everything is counted separately in each sequence. So
the counts are the same however sequences are spread over ranks. Nothing is sent here.
"""

import math

import torch


def top_k_route(logits, k, renormalize=True, bias=None):
    """Return (chosen, weights): the k best experts of each token, best first, and their weights.

    The best experts have the largest logits; with a bias, the largest probability + bias. Of equal
    ones, the one with the lowest number comes first.
    Shape: logits (..., E); chosen (..., k), int64; weights (..., k), float32.
    renormalize: if True, a token's weights add up to 1, by a softmax over its k experts (Mixtral).
        If False, the softmax is over all E, and its k weights are not rescaled (Switch).
    bias: (E,), added to the probabilities of all E, only to choose experts, not to weight them
        (DeepSeek-V3 adds it to sigmoids).
    Raises: ValueError if k is not between 1 and E.
    Lab: 11
    """
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"top_k={k} must be between 1 and the {logits.shape[-1]} experts")
    logits = logits.float()
    scores = logits if bias is None else logits.softmax(-1) + bias
    chosen = scores.argsort(dim=-1, descending=True, stable=True)[..., :k]
    if renormalize:
        return chosen, logits.gather(-1, chosen).softmax(-1)
    return chosen, logits.softmax(-1).gather(-1, chosen)


def expert_slots(tokens, n_experts, k, factor):
    """Return how many tokens of a sequence an expert takes: `factor` times the mean, rounded up."""
    return math.ceil(tokens * k / n_experts * factor)


def capacity(chosen, n_experts, factor):
    """Return a copy of `chosen`, with -1 wherever an expert has no room left.

    In each sequence an expert takes at most expert_slots(T, n_experts, k, factor) tokens: all first
    choices before all second ones, and within each of these, earlier tokens first.
    Shape: chosen (..., T, k).
    Paper: Lepikhin et al. 2020, GShard (arXiv 2006.16668)
    Lab: 11
    """
    T, k = chosen.shape[-2:]
    by_choice = chosen.transpose(-1, -2).flatten(-2)  # (..., k T): all first choices, then ...
    choices = torch.nn.functional.one_hot(by_choice, n_experts)  # (..., k T, E)
    place = choices.cumsum(-2).gather(-1, by_choice[..., None])[..., 0]  # 1 for an expert's first
    allowed = by_choice.where(place <= expert_slots(T, n_experts, k, factor), -1)
    return allowed.unflatten(-1, (k, T)).transpose(-1, -2)


def load_balance_loss(logits, chosen):
    """Return the load-balancing loss of each sequence: E times the sum of f_e P_e over all experts.

    f_e is the fraction of all choices that fell on expert e (a count, without a gradient), and P_e
    is the mean probability that the router gave it. Even loads give a loss of 1.
    Count the choices in `chosen`: with a bias, these are not the k largest logits.
    Shape: logits (..., T, E); chosen (..., T, k), before any is dropped; the result (...), float32.
    Paper: Fedus et al. 2021, Switch Transformers, equations 4 to 6 (arXiv 2101.03961)
    Lab: 11
    """
    E = logits.shape[-1]
    counts = torch.nn.functional.one_hot(chosen.flatten(-2), E).sum(-2)  # (..., E)
    part = counts / chosen[..., 0].shape[-1] / chosen.shape[-1]
    return E * (part * logits.float().softmax(-1).mean(-2)).sum(-1)


def router_z_loss(logits):
    """Return the mean square of log(sum of exp(logits)) in each sequence: it keeps logits small.

    Shape: logits (..., T, E); the result (...).
    Paper: Zoph et al. 2022, ST-MoE (arXiv 2202.08906)
    """
    return logits.float().logsumexp(-1).square().mean(-1)


def balance_bias(bias, loads, rate):
    """Move `bias` (E,), in place: up by `rate` for experts below the mean load, down above it.

    loads: (E,), the choices of the whole batch.
    Paper: Wang et al. 2024, loss-free balancing (arXiv 2408.15664); DeepSeek-V3 (arXiv 2412.19437)
    """
    bias += rate * (loads.float().mean() - loads).sign()
