"""Lab 03's OverlappedDataParallel where it is difficult: unused, checkpointing, failures."""

import copy
import re
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from data_parallel_models import difference, gradient_messages, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from ranklab import device, launch
from ranklab.baseline import checkpointed
from ranklab.data_parallel import (
    OverlappedDataParallel, average_gradients, convert_sync_batch_norm,
)
from ranklab.meter import Traffic

pytestmark = pytest.mark.timeout(120)


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
    ours = OverlappedDataParallel(mine, 1, find_unused_parameters=True)
    torch_ddp = TorchDDP(theirs, find_unused_parameters=True, bucket_cap_mb=1 / 2**20,
                      gradient_as_bucket_view=True)
    optimizers = sgd(mine), sgd(theirs)
    for step, used in enumerate(USED):
        x = torch.full((2, 4), rank + 1.0, device=device())
        sent = []
        for model, optimizer in zip((ours, torch_ddp), optimizers):
            optimizer.zero_grad(set_to_none=set_to_none)
            with Traffic() as traffic:
                model(x, used[rank]).backward()
            sent.append(gradient_messages(traffic))
            optimizer.step()
        if sent[0] != sent[1] or difference(mine, theirs) > 1e-6:
            wrong.append((step, sent, difference(mine, theirs)))
    return wrong


@pytest.mark.parametrize("set_to_none", [True, False])
def test_unused_parameters_are_treated_as_by_torch(set_to_none):
    assert launch(_unused, set_to_none, ranks=4) == [[]] * 4


class Normed(Branches):
    """Batch norm first: its backward comes after those of all branches."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, used):
        return super().forward(self.norm(x), used)


def _unused_beside_batch_norm():
    torch.manual_seed(0)
    model = convert_sync_batch_norm(Normed().to(device()), dist.new_group())
    wrapped = OverlappedDataParallel(model, 1, find_unused_parameters=True)
    wrapped(torch.randn(4, 4, device=device()), USED[2][dist.get_rank()]).backward()
    return [p.grad.cpu() for p in model.parameters()]


def test_a_batch_norm_over_ranks_goes_with_unused_parameters_in_a_group_of_its_own():
    for gradients in zip(*launch(_unused_beside_batch_norm, ranks=3)):
        assert all(torch.equal(gradients[0], each) for each in gradients)


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


def _whole_model_checkpointed(reentrant):
    torch.manual_seed(0)
    model = OverlappedDataParallel(Blocks("none").to(device()), 1)
    x = torch.full((2, 4), dist.get_rank() + 1.0, device=device(), requires_grad=True)
    with Traffic() as traffic:
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    return [p.grad.cpu() for p in model.parameters()], gradient_messages(traffic)[0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_whole_model_changes_nothing(reentrant):
    right = launch(_checkpointed, "none", False, ranks=2)
    got = launch(_whole_model_checkpointed, reentrant, ranks=2)
    for (mine, messages), plain in zip(got, right):
        assert messages == 6 and all(torch.equal(a, b) for a, b in zip(mine, plain))


# --- a backward that fails ----------------------------------------------------------------------

class Fails(torch.autograd.Function):
    """Its backward runs out of memory when `now`."""

    @staticmethod
    def forward(ctx, x, now):
        ctx.now = now
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.now:
            raise MemoryError("none left")
        return grad, None


class Fragile(nn.Module):
    """Layers, and a buffer that each forward changes; backward fails before layer `at`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, at=None):
        self.seen += 1
        for number, layer in enumerate(self.layers):
            x = Fails.apply(torch.tanh(layer(x)), number == at)
        return x * self.seen


def _after_a_failure(at, set_to_none, find_unused_parameters):
    """Of each backward: "failed", "whole", or its difference to gradients averaged one by one."""
    torch.manual_seed(0)
    model, at = Fragile().to(device()), at[dist.get_rank()]
    plain, seen = copy.deepcopy(model), []
    wrapped = OverlappedDataParallel(model, 1, find_unused_parameters=find_unused_parameters)
    for step, fails in enumerate((at, None, at, None)):
        x = torch.full((2, 4), step + dist.get_rank() + 1.0, device=device())
        plain(x).square().sum().backward()
        try:
            wrapped(x, fails).square().sum().backward()
            seen.append("whole")
        except MemoryError:
            seen.append("failed")
        if step % 2:  # in these steps no rank fails
            average_gradients(plain)
            seen[-1] = difference(model, plain)
        for net in (model, plain):
            net.zero_grad(set_to_none=set_to_none)
    return seen


@pytest.mark.parametrize("at", [(2, 2), (None, 1), (0, 3, 1)])
def test_after_a_backward_that_failed_the_next_is_right(at):
    """All ranks alike, one of them, and each elsewhere: with other buckets on their way."""
    def both():
        return [_after_a_failure(at, unset, unused) for unset, unused in
                ((True, False), (False, True))]

    for place, of_rank in zip(at, launch(both, ranks=len(at), timeout=30)):
        for first, second, third, fourth in of_rank:
            assert max(second, fourth) < 1e-6
            assert first == third == ("whole" if place is None else "failed")


def _retried():
    """Nobody calls zero_grad: what the failed backward had added up is gone all the same."""
    torch.manual_seed(0)
    model, x = Fragile().to(device()), torch.full((2, 4), dist.get_rank() + 1.0, device=device())
    plain, wrapped = copy.deepcopy(model), OverlappedDataParallel(model, 1)
    with pytest.raises(MemoryError, match="none left"):
        wrapped(x, 1).sum().backward()
    plain(x)
    for net in (wrapped, plain):
        net(x).sum().backward()
    average_gradients(plain)
    with pytest.raises(ValueError, match="two gradients"):  # and after an error of our own
        _checkpointed("reentrant", True)
    return difference(model, plain)


def test_a_failed_backward_can_be_tried_again():
    assert max(launch(_retried, ranks=2, timeout=30)) < 1e-6


# --- bad input ----------------------------------------------------------------------------------

def _frozen():
    OverlappedDataParallel(nn.Linear(2, 2).requires_grad_(False))


def _other_shapes():
    OverlappedDataParallel(nn.Linear(2, 2 + dist.get_rank()))


def _no_room():
    OverlappedDataParallel(nn.Linear(2, 2), bucket_cap_bytes=0)


def _mixed_messages():
    model = convert_sync_batch_norm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    OverlappedDataParallel(model, find_unused_parameters=True, group=dist.group.WORLD)


def _mixed_messages_of_torch():
    OverlappedDataParallel(nn.SyncBatchNorm(2), find_unused_parameters=True)


SENTENCES = {
    _frozen: "no parameter requires a gradient",
    _other_shapes: r"the 2 parameters of rank \d differ from those of another rank",
    _no_room: "bucket_cap_bytes=0 must be at least 1",
    _mixed_messages: "find_unused_parameters=True with a SyncBatchNorm in the same group",
    _mixed_messages_of_torch: "find_unused_parameters=True with a SyncBatchNorm in the same group",
}


def _said(broken):
    try:
        broken()
    except ValueError as error:
        return str(error)


def test_bad_input_is_a_sentence_on_every_rank():
    for of_rank in launch(lambda: [_said(broken) for broken in SENTENCES], ranks=2):
        for said, sentence in zip(of_rank, SENTENCES.values()):
            assert re.search(sentence, said)


# --- parameters that not all ranks share ----------------------------------------------------------

class Experts(OverlappedDataParallel):
    """`module.expert` is shared with every second rank only, all else with all ranks."""

    def __init__(self, module, **options):
        pairs = [dist.new_group([r, r + 2]) for r in range(2)]
        self.pair = pairs[dist.get_rank() % 2]
        self.experts = {id(p) for p in module.expert.parameters()}
        super().__init__(module, **options)

    def group_of(self, tensor):
        return self.pair if id(tensor) in self.experts else self.group


def _expert_gradients():
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(OrderedDict(
        first=nn.Linear(4, 4), expert=nn.Linear(4, 4), last=nn.Linear(4, 2))).to(device())
    wrapped = Experts(model, bucket_cap_bytes=30)
    wrapped(torch.full((2, 4), rank + 1.0, device=device())).sum().backward()
    order = [["pair" if b.group is wrapped.pair else "all" for b in wrapped.buckets]]
    return ({name: p.detach().cpu() for name, p in model.named_parameters()},
            {name: p.grad.cpu() for name, p in model.named_parameters()}, order)


def test_parameters_are_averaged_over_the_ranks_that_share_them():
    seen = launch(_expert_gradients, ranks=4)
    for rank, (weights, gradients, order) in enumerate(seen):
        assert order == [["all", "pair", "all"]], "in the order of backward, whatever the group"
        for other, (their_weights, their_gradients, _) in enumerate(seen):
            for name in weights:
                shared = name.startswith(("first", "last")) or (rank - other) % 2 == 0
                assert torch.equal(weights[name], their_weights[name]) == shared, name
                assert shared <= torch.equal(gradients[name], their_gradients[name]), name
    expert = seen[0][1]["expert.bias"]
    assert torch.allclose(expert, torch.full_like(expert, 2) * seen[0][0]["last.weight"].sum(0))
