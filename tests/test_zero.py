"""Lab 06's ZeRO: what the checks do not show. Odd backwards, odd models, and what is refused."""

import functools
import itertools
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranklab import device, launch
from ranklab.checks.zero.toys import SGD, Toy, loss_of, seeded
from ranklab.engine import RankError
from ranklab.zero import ZeroStage1, ZeroStage2, ZeroStage3, fastest_way

pytestmark = pytest.mark.timeout(120)

STAGES = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}


# --- equal to one process -------------------------------------------------------------------------

def twice(loss):
    first = loss(0)
    first.backward(retain_graph=True)
    first.backward()


def one_after_the_other(loss):
    for each in [loss(0), loss(10)]:
        each.backward()


def and_a_forward_without(loss):
    loss(0).backward()
    loss(10)


def of_two_forwards(loss):
    (loss(0) + loss(10)).backward()


def _differences(stages, new_model, loss_of, *all_backwards):
    """The largest difference of a weight from those of one process, for each case."""
    rank, R, worst = dist.get_rank(), dist.get_world_size(), {}
    for stage, backwards in itertools.product(stages, all_backwards):
        one, model = seeded(new_model, 0), STAGES[stage](seeded(new_model, 0))
        ours, ones = model.make_optimizer(SGD), SGD(one.parameters())
        for step in range(0, 300, 100):
            ours.zero_grad()
            ones.zero_grad()
            backwards(lambda piece: loss_of(model, step + piece + rank))
            backwards(lambda piece: sum(loss_of(one, step + piece + r) / R for r in range(R)))
            ours.step()
            ones.step()
        state = model.state_dict()
        worst[stage, backwards.__name__] = max(
            (state[name] - p).abs().max().item() for name, p in one.named_parameters()
            if p.numel())
    return worst


def test_backwards_may_come_twice_or_late_or_not_at_all():
    for worst in launch(_differences, STAGES, Toy, loss_of, twice, one_after_the_other,
                        and_a_forward_without, of_two_forwards, ranks=2):
        assert max(worst.values()) < 1e-5, worst


class Boxed(nn.Linear):
    """Its result is an attribute of an object that torch does not look into."""

    def forward(self, x):
        return types.SimpleNamespace(x=super().forward(x).tanh())


class OddUnits(nn.Module):
    """Two return no tensor; one has a parameter of no numbers alone, and is not called."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Boxed(3, 3), Boxed(3, 3), nn.ParameterList([torch.zeros(0)])])

    def forward(self, seed):
        x = torch.full((2, 3), seed / 100, device=device())
        return self.blocks[1](self.blocks[0](x).x).x.sum() + self.blocks[2][0].sum()


def test_a_unit_may_return_no_tensor_or_have_no_numbers():
    for worst in launch(_differences, [3], OddUnits, nn.Module.__call__,
                        and_a_forward_without, of_two_forwards, ranks=2):
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


def _matrices_decay():
    """{stage: what is left of the weight and of the bias after a step by a gradient of 0}"""
    left = {}
    for stage, wrap in STAGES.items():
        model = wrap(nn.Linear(1, 1).to(device()))
        weight, bias = named = list(model.module.named_parameters())
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = model.make_optimizer(functools.partial(torch.optim.SGD, lr=0.1), [
            {"params": [weight], "weight_decay": 0.5}, {"params": [bias], "weight_decay": 0.0}])
        (0 * model(torch.ones(1, 1, device=device())).sum()).backward()
        optimizer.step()
        after = model.state_dict()
        left[stage] = [(after[name] / before[name]).item() for name, _ in named]
    return left


def test_groups_go_by_the_whole_parameters_and_a_rank_may_own_nothing_of_them():
    """Two numbers, two groups, four ranks."""
    for left in launch(_matrices_decay, ranks=4):
        assert left == dict.fromkeys(STAGES, pytest.approx([0.95, 1]))


# --- what is refused ------------------------------------------------------------------------------

class Experts(nn.Module):
    """All rows take one of four blocks; the others have no gradient."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x, which):
        x = self.first(x)
        return x + self.experts[which](x)


def _missing():
    model = ZeroStage3(Experts().to(device()))
    model(torch.ones(1, 4, device=device()), which=0).sum().backward()


def test_a_missing_gradient_is_a_sentence():
    with pytest.raises(RankError, match="6 of 10 parameters got no gradient on rank 0: experts.1"):
        launch(_missing, ranks=2)


def _own_is_forgotten():
    class Forgets(ZeroStage1):
        def reduce(self, bucket):
            work = super().reduce(bucket)
            bucket.own = None
            return work

    Forgets(nn.Linear(2, 2).to(device()))(torch.ones(1, 2, device=device())).sum().backward()


def test_a_gradient_that_nothing_puts_into_own_is_a_sentence():
    with pytest.raises(RankError, match="bucket.own is None when the backward ends: put the mean"):
        launch(_own_is_forgotten, ranks=2)


def test_stage_3_comes_before_offload_and_what_does_not_fit_is_a_sentence():
    assert fastest_way(7.5e9, ranks=8, gpu_bytes=24e9, other_bytes=4e9) == (3, False, False)
    with pytest.raises(ValueError, match="9.0 GB beside the model's states do not fit into 8.0 GB"):
        fastest_way(1e9, 4, 8e9, other_bytes=9e9)
