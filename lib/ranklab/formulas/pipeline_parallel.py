"""The papers' formulas for bubbles and activations, to compare the simulation with.

P ranks, M micro-batches, V stages on each rank. A bubble is a share of the time of all ranks;
activations are counted per rank, in units of one stage and one micro-batch (in_flight_activations).
"""


def flush_bubble(P, M, V=1):
    """Return the bubble of GPipe and 1F1B, or of interleaved 1F1B with V stages per rank.

    All stages take equally long, and messages take no time.
    Paper: Narayanan et al. 2021, Megatron-LM, section 2.2 (there as a share of the time without
        the bubble: (P-1) / (V*M))
    """
    return (P - 1) / (V * M + P - 1)


def zb_h1_bubble(P, M, forward=1, input_gradient=1, weight_gradient=1):
    """Return the bubble of ZB-H1, if W takes no longer than F and I.

    Paper: Qi et al. 2023, table 2; for M < P appendix H
    """
    work = M * (forward + input_gradient + weight_gradient)
    idle = (P - 1) * (forward + input_gradient) - min(M - 1, P - 1) * weight_gradient
    return idle / (work + idle)


def gpipe_in_flight(P, M):
    return [M] * P


def one_f_one_b_in_flight(P, M):
    return [min(P - rank, M) for rank in range(P)]


def interleaved_in_flight(P, M, V):
    """Count activations per rank; each is 1/V of a rank's share of the layers."""
    return [min(2 * (P - rank - 1) + (V - 1) * P + 1, M * V) for rank in range(P)]


def zb_h1_in_flight(P, M):
    """Count activations per rank: every rank holds as many as rank 0 in 1F1B."""
    return [min(P, M)] * P
