"""Lab 06's ZeRO: equal to one process, and exactly what is held and sent."""

import copy
import functools
import itertools
import types

import pytest
import torch
import torch.distributed as dist
from sharded_toy import ADAMW, SGD, Toy, loss_of
from torch import nn

from ranklab import device, launch
from ranklab.engine import RankError
from ranklab.meter import Traffic, memory_of
from ranklab.zero import ZeroStage1, ZeroStage2, ZeroStage3, fastest_way, zero_memory, zero_traffic

pytestmark = pytest.mark.timeout(120)

STAGES = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(7), nn.Linear(7, 9), nn.Linear(9, 7)
        if number == 1:
            self.up.requires_grad_(False)
        if number == 2:
            self.down.double()

    def forward(self, x):
        y = torch.tanh(self.up(self.norm(x)))
        return x + self.down(y.to(self.down.weight.dtype)).to(x.dtype)


def new_toy(seed):
    torch.manual_seed(seed)
    return Toy([Block(i) for i in range(4)]).to(device())


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


def _unusual_backwards():
    """The largest difference of a weight from those of one process."""
    rank, R, worst = dist.get_rank(), dist.get_world_size(), {}
    for stage, backwards in itertools.product(
            STAGES, (twice, one_after_the_other, and_a_forward_without)):
        one, model = new_toy(0), STAGES[stage](new_toy(0))
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
            (state[name] - p).abs().max().item() for name, p in one.named_parameters())
    return worst


def test_backwards_may_come_twice_or_late_or_not_at_all():
    for worst in launch(_unusual_backwards, ranks=2):
        assert max(worst.values()) < 1e-5, worst


def fail_in_backward(block, inputs, output):
    def fail(gradient):
        raise ArithmeticError

    output.register_hook(fail)


def _after_a_failed_backward():
    """The norm of the optimizer's gradients: with a backward before that raised, and without."""
    found = []
    for stage, unused, fails in itertools.product(STAGES, (False, True), (False, True)):
        model = STAGES[stage](new_toy(0), find_unused_parameters=unused)
        optimizer = model.make_optimizer(SGD)
        if fails:
            hook = model.module.blocks[1].register_forward_hook(fail_in_backward)
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


class Boxed(nn.Linear):
    """Its result is an attribute of an object that torch does not look into."""

    def forward(self, x):
        return types.SimpleNamespace(x=super().forward(x).tanh())


class OddUnits(nn.Module):
    """Two return no tensor; one has a parameter of no numbers alone, and is not called."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Boxed(3, 3), Boxed(3, 3), nn.ParameterList([torch.zeros(0)])])

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x).x).x.sum() + self.blocks[2][0].sum()


def _odd_units():
    torch.manual_seed(0)
    one = OddUnits().to(device())
    model = ZeroStage3(copy.deepcopy(one))
    for each, optimizer in ((model, model.make_optimizer(SGD)), (one, SGD(one.parameters()))):
        for _ in range(2):
            optimizer.zero_grad()
            each(torch.ones(2, 3, device=device())).backward()
            optimizer.step()
        x = torch.ones(1, 3, device=device())
        (each(x) + each(-x)).backward()  # two forwards, one backward
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), dict(one.state_dict()))


def test_a_unit_may_return_no_tensor_or_have_no_numbers():
    launch(_odd_units, ranks=2)


def _groups(stage):
    model = STAGES[stage](new_toy(0))
    named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad]
    groups = [{"params": [item for item in named if item[1].dim() > 1], "weight_decay": 0.5},
              {"params": [item for item in named if item[1].dim() == 1], "weight_decay": 0.0}]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = model.make_optimizer(functools.partial(torch.optim.SGD, lr=0.1), groups)
    (0 * loss_of(model, 0)).backward()
    optimizer.step()
    after = model.state_dict()
    return {name: (before[name], after[name]) for name, _ in named}


@pytest.mark.parametrize("stage", STAGES)
def test_weight_decay_goes_by_the_whole_parameters_shape(stage):
    for found in launch(_groups, stage, ranks=3):
        for before, after in found.values():
            torch.testing.assert_close(after, before * (0.95 if before.dim() > 1 else 1))


def _owns_nothing(stage):
    torch.manual_seed(0)
    model = STAGES[stage](nn.Linear(1, 1).to(device()))
    named = list(model.module.named_parameters())
    optimizer = model.make_optimizer(ADAMW, [{"params": [each]} for each in named])
    model(torch.ones(1, 1, device=device())).sum().backward()
    optimizer.step()
    return model.state_dict()["bias"].item()


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_may_own_nothing_of_any_group(stage):
    """Two numbers, two groups, four ranks."""
    assert len(set(launch(_owns_nothing, stage, ranks=4))) == 1


class Experts(nn.Module):
    """Each row takes one of the blocks; the others have no gradient on that rank."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x, which):
        x = self.first(x)
        return x + self.experts[which](x)


# --- exactly what is held and sent ----------------------------------------------------------------

class Plain(nn.Sequential):
    """Of 3 x 110 numbers in blocks and 30 outside, all trained, in float32."""

    def __init__(self):
        super().__init__(nn.Linear(10, 2, bias=False), nn.ModuleList(
            nn.Linear(10, 10) for _ in range(3)), nn.Linear(10, 1, bias=False))

    def forward(self, x):
        for block in self[1]:
            x = torch.tanh(block(x))
        return self[0](x).sum() + self[2](x).sum()


def _counted(stage, ranks):
    model = Plain().to(device())
    wrapped = STAGES[stage](model)
    optimizer = wrapped.make_optimizer(ADAMW)
    x = torch.ones(2, 10, device=device())
    for _ in range(2):  # the second knows the order of units
        optimizer.zero_grad()
        with Traffic() as traffic:
            wrapped(x).backward()
            shards = [bucket.shard for bucket in wrapped.buckets]
            held = memory_of(wrapped, optimizer, shards=shards)
            steps = sum(s["step"].nbytes for s in optimizer.state.values()) if optimizer.state \
                else 0
            optimizer.step()
    return held, steps, traffic.sent_bytes


@pytest.mark.parametrize("stage", STAGES)
def test_memory_and_traffic_are_those_of_the_formulas(stage, ranks=5):
    total, outside = 360, 30  # 2 and 5 divide 110, 30 and 360, so nothing is padded
    wanted = zero_memory(stage, total, ranks, 4, 4, 8)
    for held, steps, sent in launch(_counted, stage, ranks, ranks=ranks):
        assert (held.parameters, held.gradients) == wanted[:2]
        assert held.optimizer_state - steps == wanted.optimizer_state
        assert sent == zero_traffic(stage, 4 * total, ranks, 4 * outside)


# --- offload, bad input ---------------------------------------------------------------------------

def _missing():
    model = ZeroStage3(Experts().to(device()), units=[])
    model(torch.ones(1, 4, device=device()), which=0).sum().backward()


def test_a_missing_gradient_is_a_sentence():
    with pytest.raises(RankError, match="6 of 10 parameters got no gradient on rank 0: experts.1"):
        launch(_missing, ranks=2)


@pytest.mark.parametrize("gb, way", [
    (100, (0, False, False)), (13, (1, False, False)), (8, (2, False, False)),
    (6, (3, False, False)), (4, (2, True, False)), (2, (3, True, False)), (0.1, (3, True, True))])
def test_the_fastest_way_that_fits(gb, way):
    assert fastest_way(1.3e9, ranks=4, gpu_bytes=gb * 1e9) == way


def test_stage_3_comes_before_offload():
    assert fastest_way(7.5e9, ranks=8, gpu_bytes=24e9, other_bytes=4e9) == (3, False, False)


def test_what_does_not_fit_is_a_sentence():
    with pytest.raises(ValueError, match="9.0 GB beside the model's states do not fit into 8.0 GB"):
        fastest_way(1e9, 4, 8e9, other_bytes=9e9)


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
