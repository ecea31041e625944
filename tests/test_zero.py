"""Lab 06's ZeRO: what the checks do not show. Odd backwards, odd models, and what is refused."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ranklab import launch
from ranklab.checks.zero.toys import SGD, Toy, loss_of, seeded
from ranklab.engine import RankError
from ranklab.meter import Traffic
from ranklab.ranks import shard_range
from ranklab.trainer.parallel import groups_here
from ranklab.zero import (
    ZeroStage1, ZeroStage2, ZeroStage3, fastest_way, muon_cost, muon_owners, newton_schulz_flops,
    sharded_muon_step,
)

pytestmark = pytest.mark.timeout(120)

STAGES = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}


# --- equal to one process -------------------------------------------------------------------------

BACKWARDS = {
    "twice": lambda loss: [same.backward(retain_graph=True) for same in [loss(0)] * 2],
    "one after the other": lambda loss: [each.backward() for each in [loss(0), loss(10)]],
    "and a forward without": lambda loss: [loss(0).backward(), loss(10)],
    "of two forwards": lambda loss: (loss(0) + loss(10)).backward(),
}


def _differences():
    """The largest difference of a weight from those of one process, for each case."""
    rank, R, worst = dist.get_rank(), dist.get_world_size(), {}
    for (stage, wrap), (name, backwards) in itertools.product(STAGES.items(), BACKWARDS.items()):
        one, model = seeded(Toy, 0), wrap(seeded(Toy, 0))
        ours, ones = model.make_optimizer(SGD), SGD(one.parameters())
        for step in range(0, 300, 100):
            ours.zero_grad()
            ones.zero_grad()
            backwards(lambda piece: loss_of(model, step + piece + rank))
            backwards(lambda piece: sum(loss_of(one, step + piece + r) / R for r in range(R)))
            ours.step()
            ones.step()
        state = model.state_dict()
        worst[stage, name] = max((state[key] - p).abs().max().item()
                                 for key, p in one.named_parameters())
    return worst


def test_backwards_may_come_twice_or_late_or_not_at_all():
    for worst in launch(_differences, ranks=2):
        assert max(worst.values()) < 1e-5, worst


def fail_in_backward(module, inputs, output):
    def fail(gradient):
        raise ArithmeticError

    output.register_hook(fail)


def _after_a_failed_backward():
    """The norm of the optimizer's gradients: with a backward before that raised, and without."""
    found = []
    for stage, unused, fails in itertools.product(STAGES, (False, True), (False, True)):
        model = STAGES[stage](seeded(Toy, 0), find_unused_parameters=unused)
        optimizer = model.make_optimizer(SGD)
        if fails:
            hook = model.module.blocks[1].down.register_forward_hook(fail_in_backward)
            with pytest.raises(ArithmeticError):
                loss_of(model, 0).backward()
            hook.remove()
        loss_of(model, 10).backward()
        found.append(nn.utils.get_total_norm(
            [p.grad.float() for group in optimizer.param_groups for p in group["params"]]).item())
    return found


def test_a_backward_may_raise_on_all_ranks():
    for found in launch(_after_a_failed_backward, ranks=2):
        assert found[1::2] == pytest.approx(found[::2])


def test_a_group_of_which_nothing_is_here_has_an_empty_parameter():
    weight, bias = (("weight", nn.Parameter(torch.ones(2))), ("bias", nn.Parameter(torch.ones(1))))
    decays, rest = groups_here([{"params": [weight], "weight_decay": 0.5}, {"params": [bias]}],
                               lambda name, p: p if name == "bias" else None)
    assert decays["weight_decay"] == 0.5 and [p.numel() for _, p in decays["params"]] == [0]
    torch.optim.AdamW([decays, rest])  # torch takes both, and no parameter is in two


# --- what is refused ------------------------------------------------------------------------------

class Forgets(ZeroStage1):
    def reduce(self, bucket):
        work = super().reduce(bucket)
        bucket.shard_grad = None
        return work


def _backward(wrap):
    loss_of(wrap(seeded(lambda: Toy(order=(0,)), 0), find_unused_parameters=wrap is Forgets),
            0).backward()


@pytest.mark.parametrize("wrap, sentence", [
    (ZeroStage3, "10 of 19 parameters got no gradient on rank 0: blocks.1.down.weight, "),
    (Forgets, "bucket.shard_grad is None when the backward ends: put the mean gradient"),
])
def test_what_is_missing_is_a_sentence(wrap, sentence):
    with pytest.raises(RankError, match=sentence):
        launch(_backward, wrap, ranks=2)


def test_what_does_not_fit_is_a_sentence():
    with pytest.raises(ValueError, match="9.0 GB beside the model's states do not fit into 8.0 GB"):
        fastest_way(1e9, 4, 8e9, other_bytes=9e9)


# --- Muon under shards ----------------------------------------------------------------------------

SHAPES = [(6, 10), (10, 6), (8, 8), (7, 5), (3, 9), (40, 12)]


def _muon_steps():
    """Two steps in rows beside two of torch.optim.Muon: (equal, FLOPs, bytes) of the last."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    rows = [slice(part.start, part.stop)
            for part in (shard_range(m, rank, ranks) for m, _ in SHAPES)]
    shards = [p.detach()[own].clone() for p, own in zip(parameters, rows)]
    buffers = [torch.zeros_like(shard) for shard in shards]
    optimizer = torch.optim.Muon(parameters, lr=0.02)
    for _ in range(2):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        grads = [p.grad[own] for p, own in zip(parameters, rows)]
        momenta = [g.lerp(b.lerp_(g, 1 - 0.95), 0.95) for g, b in zip(grads, buffers)]
        optimizer.step()
        with Traffic() as traffic, FlopCounterMode(display=False) as flops:
            sharded_muon_step(shards, momenta, SHAPES, lr=0.02)
    equal = all(torch.equal(shard, p[own]) for shard, p, own in zip(shards, parameters, rows))
    return equal, flops.get_total_flops(), traffic.sent_bytes


@pytest.mark.parametrize("ranks", (1, 3, 4))
def test_muon_in_rows_has_the_bits_and_the_cost_that_the_formula_says(ranks):
    equal, flops, sent = zip(*launch(_muon_steps, ranks=ranks))
    assert all(equal)
    assert muon_cost(SHAPES, ranks) == (max(flops), max(sent))


def test_muon_on_all_ranks_costs_all_of_it():
    whole = sum(newton_schulz_flops(*shape) for shape in SHAPES)
    rows = [(8, 4)] * 3
    assert muon_cost(SHAPES, 4, on_all=True).flops == whole
    assert muon_cost(rows, 4, on_all=True).sent_bytes == 2 * 3 * 3 * 2 * 4
    assert muon_cost(rows, 1) == (3 * newton_schulz_flops(8, 4), 0)


def test_the_longest_matrices_find_owners_first():
    assert muon_owners([(2, 2), (8, 8), (2, 2), (4, 4)], 2) == [1, 0, 1, 1]
