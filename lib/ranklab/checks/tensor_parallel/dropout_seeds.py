"""The check of dropout_seeds: all seeds of a run, side by side."""

import itertools

import torch

from ranklab.checks.exercise import Mistake

SEEDS, DATA, TENSOR = (0, 1, 2, 3, 10, 41, 42, 43, 1337), 8, (1, 2, 3, 8)
MANY = 2048  # data ranks of the largest runs


def check_dropout_seeds(dropout_seeds):
    runs = [(R, SEEDS, DATA, range(R)) for R in TENSOR] + [(8, (0, 1), MANY, (0, 7))]
    for R, seeds, data, ranks in runs:
        seen = {}  # number -> what it is for, and the other way round
        for seed, data_rank, rank in itertools.product(seeds, range(data), ranks):
            _look_at(seen, dropout_seeds, seed, data_rank, rank, R)
    yield "shared: the same on all ranks of a tensor group, another one for each data rank"
    yield f"own: another one on every rank, up to {MANY} x 8 ranks; none is a shared one"
    yield "runs with other seeds share none; nothing is sent, or drawn"


def _look_at(seen, dropout_seeds, seed, data_rank, rank, R):
    where = f"seed={seed}, data rank {data_rank}, tensor rank {rank} of {R}"
    before = torch.get_rng_state()
    shared, own = dropout_seeds(seed, data_rank, rank, R)
    if not torch.equal(before, torch.get_rng_state()):
        raise Mistake(f"{where}: torch's generator is changed", "Return seeds; the caller sets it.")
    if (type(shared), type(own)) != (int, int) or max(abs(shared), abs(own)) >= 2**63:
        raise Mistake(f"{where}: {shared}, {own}", "Two integers that torch.manual_seed takes.")
    if tuple(dropout_seeds(seed, data_rank, rank, R)) != (shared, own):
        raise Mistake(f"{where}: other seeds in a second call", "Compute them from the arguments "
                      "alone.")
    for number, what in ((shared, f"shared of seed {seed}, data rank {data_rank}"),
                         (own, f"own of seed {seed}, data rank {data_rank}, tensor rank {rank}")):
        if (other := seen.setdefault(number, what)) != what:
            raise Mistake(f"with {R} tensor ranks, {other} and {what} are the same number", "All "
                          "are different: tensor_ranks + 1 for each data rank, and room for all "
                          "of them up to the next seed.")
        if seen.setdefault(what, number) != number:
            raise Mistake(f"{where}: shared is not that of tensor rank 0", "All ranks must drop "
                          "the same of what they all hold: shared must not use tensor_rank.")
