"""The cost of experts in bytes, parameters and FLOPs, by formulas."""

import torch

from ranklab.models.gpt import count_parameters


def moe_traffic(counts, row_bytes):
    """Return the bytes that rank r sends to rank s in a layer, forward and backward: (R, R), int64.

    A row travels to its expert and back, and in backward its gradient takes both ways again. Rows
    that stay on their rank are not traffic. (The counts that ranks exchange are left out.)
    counts: (R, E), integers of any dtype, perhaps a view: how many rows of rank r chose expert e;
        rank 0 has the first E/R experts, and so on.
    row_bytes: bytes of one row of C numbers.
    Raises: ValueError if R does not divide E.
    Lab: 11
    """
    R, E = counts.shape
    if E % R:
        raise ValueError(f"{R} ranks must divide the {E} experts")
    rows = counts.unflatten(1, (R, -1)).sum(-1)  # (R, R) rows
    rows = rows - torch.diag(rows.diag())
    return 2 * row_bytes * (rows + rows.T)


def sent_by(rank, counts, row_bytes):
    """Return the bytes that a rank sends to all others in moe_traffic; counts may be lists."""
    return moe_traffic(torch.as_tensor(counts), row_bytes)[rank].sum().item()


def even_bytes(tokens, k, width, ranks, element=2, backward=True):
    """Return the bytes that a rank sends to others in a layer, for even loads: see moe_traffic."""
    return 2 * (1 + backward) * tokens * k * width * element * (ranks - 1) // ranks


def moe_parameters(config):
    """Return (all, active): the parameters of a MoE GPT, and the number used by one token."""
    C, E, k = config.n_embd, config.n_expert, config.top_k
    dense = count_parameters(config) - config.n_layer * 8 * C * C  # each block without its MLP
    unit = config.n_layer * 2 * C  # parameters of all MLPs for each number of their width
    rest = dense + unit * config.shared_width + config.n_layer * E * C  # and the routers
    return rest + unit * E * config.expert_width, rest + unit * k * config.expert_width
