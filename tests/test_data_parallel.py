"""Lab 03's OverlappedDataParallel: equal to one process and to torch DDP, to the byte."""

import copy

import pytest
import torch
import torch.distributed as dist
from data_parallel_models import (batch, cnn, difference, gpt, gradient_messages, loss_of,
                                  my_batch, nasty, sgd)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ranklab import device, launch
from ranklab.data_parallel import (OverlappedDataParallel, Replica, average_gradients, no_sync,
                                   replicas_agree)
from ranklab.engine import RankError
from ranklab.meter import Traffic

pytestmark = pytest.mark.timeout(120)

RANKS = (1, 2, 3, 4)
KIB = 1024


# --- equal to one process, and to torch ---------------------------------------------------------

def train(wrapped, model, steps=4, set_to_none=True, **kind):
    """The mean loss over ranks and the traffic of each step."""
    optimizer, seen = sgd(model), []
    for step in range(steps):
        with Traffic() as traffic:
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = loss_of(wrapped, *my_batch(step=step, **kind))
            loss.backward()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        seen.append((loss.item() / dist.get_world_size(), traffic))
        if step < steps - 1:  # gradients and weights of the last step can be compared
            optimizer.step()
    return seen


def train_alone(kind, model, steps=4):
    optimizer, losses = sgd(model), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(kind, step))
        loss.backward()
        losses.append(loss.item())
        if step < steps - 1:
            optimizer.step()
    return losses


def _against_one_process(kinds, caps):
    wrong = []
    for kind in kinds:
        alone = kind(0)  # what rank 0 begins with
        losses = train_alone(kind, alone)
        for cap in caps:
            for set_to_none in (True, False):
                model = kind(dist.get_rank())
                ours = OverlappedDataParallel(model, cap)
                seen = train(ours, model, set_to_none=set_to_none, kind=kind)
                off = [abs(a - b) for (a, _), b in zip(seen, losses)]
                off.append(difference(model, alone))
                if max(off) > 2e-6 or not replicas_agree(model):
                    wrong.append((kind.__name__, cap, set_to_none, max(off)))
    return wrong


@pytest.mark.parametrize("R", RANKS)
def test_equal_to_one_process(R):
    caps = [1, 2 * KIB, 10**9] if R < 4 else [2 * KIB]
    assert launch(_against_one_process, [nasty, gpt, cnn], caps, ranks=R) == [[]] * R


def _against_torch(cases):
    wrong = []
    for kind, cap in cases:
        mine, theirs = kind(dist.get_rank()), kind(dist.get_rank())
        ours = train(OverlappedDataParallel(mine, cap), mine, kind=kind)
        torchs = train(TorchDDP(theirs, bucket_cap_mb=cap / 2**20), theirs, kind=kind)
        off = [abs(a - b) for (a, _), (b, _) in zip(ours, torchs)] + [difference(mine, theirs)]
        if max(off) > 5e-6:
            wrong.append((kind.__name__, cap, "values", max(off)))
        for (_, ours_sent), (_, torchs_sent) in list(zip(ours, torchs))[2:]:
            if gradient_messages(ours_sent) != gradient_messages(torchs_sent):
                wrong.append((kind.__name__, cap, gradient_messages(ours_sent),
                              gradient_messages(torchs_sent)))
            if ours_sent.sent_bytes != torchs_sent.sent_bytes:  # buffers as well
                wrong.append((kind.__name__, cap, ours_sent.sent_bytes, torchs_sent.sent_bytes))
    return wrong


def batch_norm_cnn(seed):
    return cnn(seed, "batch")


@pytest.mark.parametrize("R", RANKS)
def test_equal_to_torch_in_values_bytes_and_messages(R):
    cases = [(kind, cap) for kind in (cnn, batch_norm_cnn, gpt)
             for cap in ((1, 3 * KIB, 25 * 2**20) if R < 4 else (3 * KIB,))]
    assert launch(_against_torch, cases + [(nasty, 1)], ranks=R) == [[]] * R


def _sent():
    seen = []
    for kind, cap, buffers in ((gpt, 4 * KIB, 1), (nasty, 1, 1), (cnn, 10**9, 0)):
        model = kind(0)
        wrapped = OverlappedDataParallel(model, cap)
        (_, traffic), *_ = train(wrapped, model, steps=1, kind=kind)
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        seen.append((gradient_messages(traffic) == (len(wrapped.buckets), trained),
                     traffic.calls["broadcast"] == buffers))
    return seen


@pytest.mark.parametrize("R", RANKS)
def test_one_message_for_each_bucket_and_each_gradient_once(R):
    assert launch(_sent, ranks=R) == [[(True, True)] * 3] * R


def _in_a_group():
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    model = nasty(dist.get_rank())
    wrapped = OverlappedDataParallel(model, group=group)
    with Traffic() as traffic:
        loss_of(wrapped, *my_batch(nasty, 0)).backward()
    return {op.group for op in traffic.ops}, replicas_agree(model, group)


def test_a_group_meets_nobody_else():
    assert launch(_in_a_group, ranks=3)[1:] == [({(1, 2)}, True)] * 2


# --- accumulation, views, buffers ---------------------------------------------------------------

def _accumulate(kinds):
    return [_accumulated(kind) for kind in kinds]


def _accumulated(kind):
    alone, model = kind(0), kind(dist.get_rank())
    wrapped = OverlappedDataParallel(model, 2 * KIB)
    theirs = TorchDDP(copy.deepcopy(model))
    R, rank, counted = dist.get_world_size(), dist.get_rank(), []
    for step in range(3):  # gradients go on growing: no zero_grad in between
        parts = [batch(kind, 10 * step + piece) for piece in range(3)]
        for x, y in parts:
            loss_of(alone, x, y).backward()
        for ddp in (wrapped, theirs):
            with Traffic() as traffic:
                with ddp.no_sync():
                    for x, y in parts[:2]:
                        loss_of(ddp, x.chunk(R)[rank], y.chunk(R)[rank]).backward()
                x, y = parts[2]
                loss_of(ddp, x.chunk(R)[rank], y.chunk(R)[rank]).backward()
            counted.append(traffic.calls["all_reduce"])
    return difference(model, alone), difference(model, theirs.module), counted[-2:], \
        len(wrapped.buckets)


@pytest.mark.parametrize("R", RANKS)
def test_no_sync_adds_up_and_sends_once(R):
    for of_rank in launch(_accumulate, (nasty, gpt), ranks=R):
        for from_one, from_torch, counted, buckets in of_rank:
            assert from_one < 5e-6 and from_torch < 5e-6
            assert counted[0] == buckets and counted[1] > 0


def _raise_inside():
    model = OverlappedDataParallel(nasty(0))
    try:
        with no_sync(model):
            with no_sync(model):
                pass
            assert not model.sync
            raise KeyError
    except KeyError:
        return model.sync


def test_no_sync_ends_also_when_the_step_fails():
    assert launch(_raise_inside, ranks=1) == [True]


def _views(set_to_none):
    model = gpt(0)
    wrapped = OverlappedDataParallel(model, 4 * KIB)
    train(wrapped, model, steps=2, set_to_none=set_to_none, kind=gpt)
    flat = {bucket.flat.untyped_storage().data_ptr() for bucket in wrapped.buckets}
    return {p.grad.untyped_storage().data_ptr() for p in model.parameters()} == flat


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_views_of_buckets(set_to_none):
    assert launch(_views, set_to_none, ranks=2) == [True, True]


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
    (_, first), *rest = seen = launch(_buffers, ranks=3)
    assert [messages for messages, _ in seen] == [0] * 3
    for _, buffers in rest:
        assert all(torch.equal(a, b) for a, b in zip(buffers, first))


def test_a_checkpoint_knows_nothing_of_ranks():
    def keys():
        plain, wrapped = nasty(0), OverlappedDataParallel(nasty(1))
        wrapped.load_state_dict(plain.state_dict())
        mine = wrapped.state_dict()
        return list(mine) == list(plain.state_dict()) and torch.equal(
            mine["twice.weight"], plain.twice.weight)

    assert launch(keys, ranks=2) == [True, True]


def test_the_class_is_what_the_naive_function_does():
    def both():
        mine, plain = gpt(0), gpt(0)
        loss_of(OverlappedDataParallel(mine), *my_batch(gpt, 0)).backward()
        loss_of(plain, *my_batch(gpt, 0)).backward()
        with Traffic() as traffic:
            average_gradients(plain)
        return difference(mine, plain), traffic.calls["all_reduce"], len(list(plain.parameters()))

    for off, messages, parameters in launch(both, ranks=3):
        assert off < 1e-7 and messages == parameters


def test_the_base_class_alone_sends_no_gradient():
    with pytest.raises(RankError, match="finish"):
        launch(lambda: loss_of(Replica(gpt(0)), *my_batch(gpt, 0)).backward(), ranks=1)
