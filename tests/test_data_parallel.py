"""Lab 03's OverlappedDataParallel: equal to torch DDP, to the byte."""

import pytest
import torch
import torch.distributed as dist
from data_parallel_models import (
    cnn, difference, gpt, gradient_messages, loss_of, my_batch, nasty, sgd,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ranklab import device, launch
from ranklab.data_parallel import OverlappedDataParallel, Replica, no_sync
from ranklab.engine import RankError
from ranklab.meter import Traffic

pytestmark = pytest.mark.timeout(120)

KIB = 1024


# --- equal to torch -----------------------------------------------------------------------------

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


def _against_torch(cases):
    wrong = []
    for kind, cap in cases:
        mine, theirs = kind(dist.get_rank()), kind(dist.get_rank())
        ours = train(OverlappedDataParallel(mine, cap), mine, kind=kind)
        torch_ddp = train(TorchDDP(theirs, bucket_cap_mb=cap / 2**20), theirs, kind=kind)
        off = [abs(a - b) for (a, _), (b, _) in zip(ours, torch_ddp)] + [difference(mine, theirs)]
        if max(off) > 5e-6:
            wrong.append((kind.__name__, cap, "values", max(off)))
        for (_, ours_sent), (_, torch_sent) in list(zip(ours, torch_ddp))[2:]:
            if gradient_messages(ours_sent) != gradient_messages(torch_sent):
                wrong.append((kind.__name__, cap, gradient_messages(ours_sent),
                              gradient_messages(torch_sent)))
            if ours_sent.sent_bytes != torch_sent.sent_bytes:  # buffers as well
                wrong.append((kind.__name__, cap, ours_sent.sent_bytes, torch_sent.sent_bytes))
    return wrong


def batch_norm_cnn(seed):
    return cnn(seed, "batch")


def test_equal_to_torch_in_values_bytes_and_messages():
    cases = [(kind, cap) for kind in (batch_norm_cnn, gpt) for cap in (1, 3 * KIB, 25 * 2**20)]
    assert launch(_against_torch, [*cases, (cnn, 3 * KIB), (nasty, 1)], ranks=3) == [[]] * 3


# --- accumulation, views, buffers ---------------------------------------------------------------

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


def test_the_base_class_alone_sends_no_gradient():
    with pytest.raises(RankError, match="finish"):
        launch(lambda: loss_of(Replica(gpt(0)), *my_batch(gpt, 0)).backward(), ranks=1)
