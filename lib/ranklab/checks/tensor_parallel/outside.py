"""The checks of sequence_parallel_norm and dropout_seeds: what is outside of the regions."""

import copy
from functools import partial

import torch
from torch import nn

from ranklab.checks.exercise import Mistake
from ranklab.checks.tensor_parallel.beside import Whole, beside, on_four, seeded
from ranklab.engine import device

B, T, C = 2, 12, 6
NORMS = {"LayerNorm": nn.LayerNorm, "LayerNorm without bias": partial(nn.LayerNorm, bias=False),
         "RMSNorm": nn.RMSNorm, "LayerNorm, frozen weight": nn.LayerNorm}
FAILURES = {"'NoneType' object": "A norm may have no bias: go through named_parameters().",
            "no attribute 'bias'": "RMSNorm has no bias: go through named_parameters().",
            "hook on a tensor that doesn't require": "A frozen parameter has no gradient to sum.",
            "cannot assign": "functional_call(norm, {name: tensor}, x) computes with other tensors."}
LEFT = ("It is changed by the call before: a hook on its own parameter stays there. "
        "functional_call(norm, {name: tensor}, x) leaves it alone.")
DRIFT = ("Each rank knows the gradient of its own tokens, so its weight would drift: the "
         "norm's parameters come through copy_to_region. One all-reduce each, and a sum.")
HINTS = {"weight": DRIFT, "bias": DRIFT,
         "value": "norm(x) of this rank's tokens, with all that the norm has: eps, bias or none.",
         "x": "No other rank has these tokens: x needs nothing, the norm's parameters do."}


def _norms(sequence_parallel_norm, ranks):
    for case, new in NORMS.items():
        one = new(C).to(device())
        for place, (name, p) in enumerate(one.named_parameters()):
            p.data = seeded(place, C)
            p.requires_grad_("frozen" not in case or name == "bias")
        norm, own = copy.deepcopy(one), copy.deepcopy(one)
        whole = Whole(seeded(3, B, T, C).requires_grad_(), 1, ranks.at(T))
        x, plain = whole.leaf(), whole.leaf()
        yield from beside(
            case, ranks, lambda: sequence_parallel_norm(norm, x, ranks.group),
            {"x": x, **dict(norm.named_parameters())}, lambda: one(whole.tensor),
            {"x": whole} | {name: Whole(p) for name, p in one.named_parameters()}, whole, HINTS,
            (), [p.nbytes for p in one.parameters() if p.requires_grad])
        norm.zero_grad()
        yield from beside(
            f"{case}, by itself afterwards", ranks, lambda: norm(plain), dict(
                norm.named_parameters()), lambda: own(plain.detach()),
            {name: Whole(p) for name, p in own.named_parameters()}, Whole(None), {"value": LEFT})


def check_sequence_parallel_norm(sequence_parallel_norm):
    on_four(_norms, sequence_parallel_norm, FAILURES)
    yield "this rank's tokens; gradients of the norm are sums: as one process, on 1 to 4 ranks"
    yield "LayerNorm with and without bias, RMSNorm, frozen; one all-reduce for each parameter"
    yield "twice in a row, and afterwards the norm is as before"


SEEDS, DATA, TENSOR = (0, 1, 2, 3, 10, 41, 42, 43, 1337), 8, (1, 2, 3, 8)


def check_dropout_seeds(dropout_seeds):
    for R in TENSOR:
        seen = {}  # number -> what it is for, and the other way round
        for seed in SEEDS:
            for data_rank in range(DATA):
                for rank in range(R):
                    _look_at(seen, dropout_seeds, seed, data_rank, rank, R)
    yield "shared: the same on all ranks of a tensor group, another one for each data rank"
    yield "own: another one on every rank, up to 8 x 8 ranks; none is a shared one"
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
        raise Mistake(f"{where}: others the next time", "Compute them from the arguments alone.")
    for number, what in ((shared, f"shared of seed {seed}, data rank {data_rank}"),
                         (own, f"own of seed {seed}, data rank {data_rank}, tensor rank {rank}")):
        if (other := seen.setdefault(number, what)) != what:
            raise Mistake(f"with {R} tensor ranks, {other} and {what} are the same number", "All "
                          "are different: tensor_ranks + 1 for each data rank, and room for all "
                          "of them up to the next seed.")
        if seen.setdefault(what, number) != number:
            raise Mistake(f"{where}: shared is not that of tensor rank 0", "What ranks hold alike "
                          "drops alike: shared does not follow from tensor_rank.")
