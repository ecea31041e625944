"""Lab 03's OverlappedDataParallel: equal to torch DDP, to the byte; what its check leaves out."""

import copy
import re
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from data_parallel_models import (
    cnn, difference, gpt, gradient_messages, loss_of, my_batch, nasty, sgd,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from ranklab import device, launch
from ranklab.data_parallel import (
    OverlappedDataParallel, Replica, average_gradients, convert_sync_batch_norm,
)
from ranklab.engine import RankError
from ranklab.meter import Traffic

pytestmark = pytest.mark.timeout(120)


# --- beside torch ---------------------------------------------------------------------------------

def train(wrapped, model, kind, steps=4):
    """The traffic of each step; gradients and weights of the last one are left."""
    optimizer, seen = sgd(model), []
    for step in range(steps):
        with Traffic() as traffic:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(wrapped, *my_batch(step=step, kind=kind)).backward()
        seen.append(traffic)
        if step < steps - 1:
            optimizer.step()
    return seen


def batch_norm_cnn(seed):
    return cnn(seed, "batch")


def _against_torch(cases):
    wrong = []
    for kind, cap in cases:
        mine, theirs = kind(dist.get_rank()), kind(dist.get_rank())
        wrapped = OverlappedDataParallel(mine, cap)
        ours = train(wrapped, mine, kind)
        torch_ddp = train(TorchDDP(theirs, bucket_cap_mb=cap / 2**20), theirs, kind)
        sent = [[(gradient_messages(traffic), traffic.sent_bytes) for traffic in both[2:]]
                for both in (ours, torch_ddp)]
        flats = {bucket.flat.untyped_storage().data_ptr() for bucket in wrapped.buckets}
        views = {p.grad.untyped_storage().data_ptr() for p in mine.parameters()
                 if p.grad is not None}
        if difference(mine, theirs) > 5e-6 or sent[0] != sent[1] or views != flats:
            wrong.append((kind.__name__, cap, difference(mine, theirs), sent, views == flats))
    return wrong


def test_equal_to_torch_in_values_bytes_and_messages_and_gradients_are_views_of_buckets():
    cases = [(kind, cap) for kind in (batch_norm_cnn, gpt) for cap in (1, 3072, 25 * 2**20)]
    assert launch(_against_torch, [*cases, (cnn, 3072), (nasty, 1)], ranks=3) == [[]] * 3


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


class Layers(nn.Module):
    """Each call says which layers it uses, and at which one its backward fails."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, used=(0, 1, 2), at=None):
        self.seen += 1
        for number in used:
            x = Fails.apply(torch.tanh(self.layers[number](x)), number == at)
        return x * self.seen


def new_layers():
    torch.manual_seed(0)
    return Layers().to(device())


def rows(step=0):
    return torch.full((2, 4), step + dist.get_rank() + 1.0, device=device())


USED = [((0, 1), (1,), (0,), (0, 1)), ((2,), (2,), (2,), (2,)), ((0,), (1,), (2,), (0,)),
        ((1,), (1, 0), (1,), (1,))]  # in each step, by each of four ranks


def _unused(set_to_none):
    mine, theirs, wrong = new_layers(), new_layers(), []
    ours = OverlappedDataParallel(mine, 1, find_unused_parameters=True)
    torch_ddp = TorchDDP(theirs, find_unused_parameters=True, bucket_cap_mb=1 / 2**20,
                         gradient_as_bucket_view=True)
    optimizers = sgd(mine), sgd(theirs)
    for step, used in enumerate(USED):
        sent = []
        for model, optimizer in zip((ours, torch_ddp), optimizers):
            optimizer.zero_grad(set_to_none=set_to_none)
            with Traffic() as traffic:
                model(rows(), used[dist.get_rank()]).square().sum().backward()
            sent.append(gradient_messages(traffic))
            optimizer.step()
        if sent[0] != sent[1] or difference(mine, theirs) > 1e-6:
            wrong.append((step, sent, difference(mine, theirs)))
    return wrong


@pytest.mark.parametrize("set_to_none", [True, False])
def test_unused_parameters_are_treated_as_by_torch(set_to_none):
    assert launch(_unused, set_to_none, ranks=4) == [[]] * 4


# --- beside gradients averaged one by one ---------------------------------------------------------

def _checkpointed_as_a_whole(reentrant):
    model, plain, x = new_layers(), new_layers(), rows().requires_grad_()
    with Traffic() as traffic:
        wrapped = OverlappedDataParallel(model, 1)
        checkpoint(wrapped, x, use_reentrant=reentrant).sum().backward()
    checkpoint(plain, x, use_reentrant=reentrant).sum().backward()
    average_gradients(plain)
    return difference(model, plain), gradient_messages(traffic)[0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_whole_model_changes_nothing(reentrant):
    for largest, messages in launch(_checkpointed_as_a_whole, reentrant, ranks=2):
        assert largest < 1e-6 and messages == 6 + 1  # one more, of shapes, when it is made


def _after_a_failure(at, set_to_none, find_unused_parameters):
    """Of each backward: "failed", "whole", or its difference to gradients averaged one by one."""
    model, plain, seen = new_layers(), new_layers(), []
    wrapped = OverlappedDataParallel(model, 1, find_unused_parameters=find_unused_parameters)
    for step, fails in enumerate((at[dist.get_rank()], None) * 2):
        plain(rows(step)).sum().backward()
        try:
            wrapped(rows(step), at=fails).sum().backward()
            seen.append("whole")
        except MemoryError:
            seen.append("failed")
        if step % 2:  # in these steps no rank fails
            average_gradients(plain)
            seen[-1] = difference(model, plain)
        plain.zero_grad(set_to_none=set_to_none)
        if set_to_none is False or seen[-1] != "failed":  # else nobody calls it: all is gone anyway
            model.zero_grad(set_to_none=set_to_none)
    return seen


@pytest.mark.parametrize("at", [(2, 2), (None, 1), (0, 2, 1)])
def test_after_a_backward_that_failed_the_next_is_right(at):
    """All ranks alike, one of them, and each at another layer: with other buckets on their way."""
    def both():
        return [_after_a_failure(at, True, False), _after_a_failure(at, False, True)]

    for layer, of_rank in zip(at, launch(both, ranks=len(at), timeout=30)):
        for first, second, third, fourth in of_rank:
            assert max(second, fourth) < 1e-6
            assert first == third == ("whole" if layer is None else "failed")


# --- buffers, checkpoints, the base class ---------------------------------------------------------

def _buffers():
    model = cnn(0, "batch")
    wrapped = OverlappedDataParallel(model)
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        wrapped(x.to(device())).sum().backward()
    wrapped.eval()
    with torch.no_grad():
        wrapped(x.to(device()))  # the first one after training has rank 0's statistics
        with Traffic() as traffic:
            for _ in range(dist.get_rank()):
                wrapped(x.to(device()))
    return traffic.sent_messages, [buffer.cpu() for buffer in model.buffers()]


def test_buffers_are_rank_0s_and_evaluation_may_be_uneven():
    seen = launch(_buffers, ranks=3)
    assert [messages for messages, _ in seen] == [0] * 3
    for buffers in zip(*(buffers for _, buffers in seen)):
        assert all(torch.equal(buffers[0], each) for each in buffers)


def test_a_checkpoint_knows_nothing_of_ranks():
    def keys():
        plain, wrapped = nasty(0), OverlappedDataParallel(nasty(1))
        wrapped.load_state_dict(plain.state_dict())
        mine = wrapped.state_dict()
        return list(mine) == list(plain.state_dict()) and torch.equal(
            mine["twice.weight"], plain.twice.weight)

    assert launch(keys, ranks=2) == [True, True]


def test_the_base_class_alone_sends_no_gradient():
    with pytest.raises(RankError, match="finish"):
        launch(lambda: loss_of(Replica(gpt(0)), *my_batch(gpt, 0)).backward(), ranks=1)


# --- bad input ------------------------------------------------------------------------------------

def _mixed_messages(norm, **group):
    OverlappedDataParallel(convert_sync_batch_norm(nn.Sequential(nn.Linear(2, 2), norm(2))),
                           find_unused_parameters=True, **group)


MIXED = "find_unused_parameters=True with a SyncBatchNorm in the same group"
REFUSED = [
    (lambda: OverlappedDataParallel(nn.Linear(2, 2).requires_grad_(False)),
     "no parameter requires a gradient"),
    (lambda: OverlappedDataParallel(nn.Linear(2, 2 + dist.get_rank())),
     r"the 2 parameters of rank \d differ from those of another rank"),
    (lambda: OverlappedDataParallel(nn.Linear(2, 2), bucket_cap_bytes=0),
     "bucket_cap_bytes=0 must be at least 1"),
    (lambda: _mixed_messages(nn.BatchNorm1d, group=dist.group.WORLD), MIXED),
    (lambda: _mixed_messages(nn.SyncBatchNorm), MIXED),
]


def _said(broken):
    try:
        broken()
    except ValueError as error:
        return str(error)


def test_bad_input_is_a_sentence_on_every_rank():
    for of_rank in launch(lambda: [_said(broken) for broken, _ in REFUSED], ranks=2):
        for said, (_, sentence) in zip(of_rank, REFUSED):
            assert re.search(sentence, said)


# --- parameters that not all ranks share ----------------------------------------------------------

class Experts(OverlappedDataParallel):
    """`module.expert` is shared with every second rank only, all else with all ranks."""

    def __init__(self, module, **options):
        self.pair = [dist.new_group([r, r + 2]) for r in range(2)][dist.get_rank() % 2]
        self.experts = {id(p) for p in module.expert.parameters()}
        super().__init__(module, **options)

    def group_of(self, tensor):
        return self.pair if id(tensor) in self.experts else self.group


def _expert_gradients():
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(OrderedDict(
        first=nn.Linear(4, 4), expert=nn.Linear(4, 4), last=nn.Linear(4, 2))).to(device())
    wrapped = Experts(model, bucket_cap_bytes=30)
    plain = copy.deepcopy(model)  # the same on the ranks that share it, from here on
    wrapped(rows()).sum().backward()
    plain(rows()).sum().backward()
    for name, p in plain.named_parameters():
        dist.all_reduce(p.grad, group=wrapped.pair if "expert" in name else None)
        p.grad /= 2 if "expert" in name else 4
    order = ["pair" if b.group is wrapped.pair else "all" for b in wrapped.buckets]
    return difference(model, plain), order


def test_parameters_are_averaged_over_the_ranks_that_share_them():
    for largest, order in launch(_expert_gradients, ranks=4):
        assert order == ["all", "pair", "all"], "in the order of backward, whatever the group"
        assert largest < 1e-6
