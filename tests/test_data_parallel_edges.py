"""Lab 03's OverlappedDataParallel where it is difficult: overlap, order, unused, checkpointing."""

import copy

import pytest
import torch
import torch.distributed as dist
from data_parallel_models import difference, gradient_messages, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from ranklab import device, launch
from ranklab.baseline import checkpointed
from ranklab.data_parallel import OverlappedDataParallel, average_gradients
from ranklab.engine import RankError
from ranklab.meter import Traffic

pytestmark = pytest.mark.timeout(120)

RANKS = (1, 2, 3, 4)


# --- overlap ------------------------------------------------------------------------------------

class Noted(nn.Module):
    """Layers that note when their backward runs."""

    def __init__(self, events):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        for number, layer in enumerate(self.layers):
            layer.register_full_backward_pre_hook(lambda *_, n=number: events.append(n))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _order_of_events():
    events = []
    model = OverlappedDataParallel(Noted(events), cap_bytes=1)
    all_reduce = dist.all_reduce

    def noted(x, *args, **kwargs):
        work = all_reduce(x, *args, **kwargs)
        events.append(("sent", x.numel()))
        return work

    dist.all_reduce = noted
    model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    return events


def test_messages_leave_while_backward_goes_on():
    layer = [("sent", 4), ("sent", 16)]  # bias, weight
    for events in launch(_order_of_events, ranks=2):
        assert events == [2, *layer, 1, *layer, 0, *layer]


class TwoWays(nn.Module):
    """Ranks use their branches in different orders: so do the gradients become ready."""

    def __init__(self, names):
        super().__init__()
        self.a, self.b, self.order = nn.Linear(3, 3), nn.Linear(3, 3), names

    def forward(self, x):
        for name in self.order:
            x = torch.tanh(getattr(self, name)(x))
        return x.square().sum()


def _ready_in_another_order():
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = TwoWays("ab" if rank % 2 else "ba").to(device())
    plain, x = copy.deepcopy(model), torch.full((2, 3), rank + 1.0, device=device())
    OverlappedDataParallel(model, cap_bytes=1)(x).backward()
    plain(x).backward()
    average_gradients(plain)
    return difference(model, plain)


def test_ranks_may_be_ready_in_different_orders():
    assert max(launch(_ready_in_another_order, ranks=3)) < 1e-6


# --- unused parameters --------------------------------------------------------------------------

class Branches(nn.Module):
    """Three branches; which of them are used is said in each call."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, used):
        return sum((self.branches[i](x).square().mean() for i in used), x.mean() * 0)


USED = [((0, 1), (1,), (0,), (0, 1)), ((2,), (2,), (2,), (2,)), ((0,), (1,), (2,), (0,)),
        ((1,), (1, 0), (1,), (1,))]  # in each step, by each of up to four ranks


def _unused(set_to_none):
    torch.manual_seed(0)
    mine = Branches().to(device())
    theirs, rank, wrong = copy.deepcopy(mine), dist.get_rank(), []
    ours = OverlappedDataParallel(mine, 1, find_unused=True)
    torchs = TorchDDP(theirs, find_unused_parameters=True, bucket_cap_mb=1 / 2**20,
                      gradient_as_bucket_view=True)
    optimizers = sgd(mine), sgd(theirs)
    for step, used in enumerate(USED):
        x = torch.full((2, 4), rank + 1.0, device=device())
        sent = []
        for model, optimizer in zip((ours, torchs), optimizers):
            optimizer.zero_grad(set_to_none=set_to_none)
            with Traffic() as traffic:
                model(x, used[rank]).backward()
            sent.append(gradient_messages(traffic))
            optimizer.step()
        if sent[0] != sent[1] or difference(mine, theirs) > 1e-6:
            wrong.append((step, sent, difference(mine, theirs)))
    return wrong


@pytest.mark.parametrize("R", RANKS)
def test_unused_parameters_are_treated_as_by_torch(R):
    for set_to_none in (True, False):
        assert launch(_unused, set_to_none, ranks=R) == [[]] * R


def _missing(used_by_rank):
    model = OverlappedDataParallel(Branches().to(device()), 1)
    used, said = used_by_rank[dist.get_rank()], "nothing"
    x = torch.ones(2, 4, device=device(), requires_grad=True)
    try:
        model(x, used).backward()
    except ValueError as error:
        said = str(error)
    model(x, (0, 1, 2)).backward()  # and the next step works
    return said


def test_a_missing_gradient_is_an_error_at_the_end_of_that_backward():
    names = "branches.1.weight, branches.1.bias"
    everywhere = launch(_missing, [(0, 2), (0, 2)], ranks=2)
    for rank, said in enumerate(everywhere):
        assert said.startswith(f"2 of 6 parameters got no gradient on rank {rank}: {names}. Use")
    here, there = launch(_missing, [(0, 1, 2), (0, 2)], ranks=2)
    assert here == "nothing" and names in there  # the others are not left waiting


def test_no_gradient_at_all_is_an_error_too():
    said = launch(_missing, [(), ()], ranks=2)
    assert "6 of 6 parameters got no gradient on rank 1" in said[1]


# --- activation checkpointing -------------------------------------------------------------------

WAYS = {"none": lambda f, x: f(x), "ours": checkpointed,
        "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
        "not reentrant": lambda f, x: checkpoint(f, x, use_reentrant=False)}


class Blocks(nn.Module):
    """All in checkpoints, so that every gradient comes in a backward inside the backward."""

    def __init__(self, way, twice=False):
        super().__init__()
        self.blocks, self.way = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), way
        self.order = (0, 1, 2, 1) if twice else (0, 1, 2)

    def forward(self, x):
        for i in self.order:
            x = WAYS[self.way](self.blocks[i], x)
        return x


def _checkpointed(way, twice):
    torch.manual_seed(0)
    model = Blocks(way, twice).to(device())
    x = torch.full((2, 4), dist.get_rank() + 1.0, device=device(), requires_grad=True)
    OverlappedDataParallel(model, 1)(x).square().sum().backward()
    return [p.grad.cpu() for p in model.parameters()]


@pytest.mark.parametrize("way", ["ours", "reentrant", "not reentrant"])
def test_activation_checkpointing_changes_nothing(way):
    twice = way == "not reentrant"
    right = launch(_checkpointed, "none", twice, ranks=2)
    got = launch(_checkpointed, way, twice, ranks=2)
    for mine, plain in zip(got, right):
        assert all(torch.equal(a, b) for a, b in zip(mine, plain))


# --- bad input ----------------------------------------------------------------------------------

def _frozen():
    OverlappedDataParallel(nn.Linear(2, 2).requires_grad_(False))


def _other_shapes():
    OverlappedDataParallel(nn.Linear(2, 2 + dist.get_rank()))


def _no_room():
    OverlappedDataParallel(nn.Linear(2, 2), cap_bytes=0)


@pytest.mark.parametrize("broken, sentence", [
    (_frozen, "no parameter requires a gradient"),
    (_other_shapes, r"the 2 parameters of rank \d differ from those of another rank"),
    (_no_room, "cap_bytes=0 must be at least 1"),
    (lambda: _checkpointed("reentrant", True), "blocks.1.bias got two gradients in one backward"),
])
def test_bad_input_is_a_sentence(broken, sentence):
    with pytest.raises(RankError, match=sentence):
        launch(broken, ranks=2)


def test_bad_input_is_seen_by_every_rank():
    def seen(broken):
        try:
            broken()
        except ValueError as error:
            return str(error)

    for broken in (_frozen, _other_shapes, _no_room):
        first, second = launch(seen, broken, ranks=2)
        assert first and second
