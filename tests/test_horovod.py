"""ranklab.horovod: values, any order of readiness, what it sends, join, process sets."""

import random
import time

import pytest
import torch
import torch.distributed as dist

from ranklab import launch

def hvd_ranks(fn, *args, ranks=2, nodes=1, **settings):
    """`fn(hvd, *args)` on ranks between init() and shutdown()."""

    def run():
        import ranklab.horovod as hvd

        hvd.init(**{"stall_check": 10, "stall_shutdown": 20} | settings)
        value = fn(hvd, *args)
        hvd.barrier()
        hvd.shutdown()
        return value

    return launch(run, ranks=ranks, nodes=nodes, timeout=40)


def mine(rank, n=7, dtype=torch.float32):
    return ((torch.arange(n) * 3 + rank * 5) % 11 - 4).to(dtype)


# --- values -------------------------------------------------------------------------------------

def every_verb(hvd):
    rank, R = hvd.rank(), hvd.size()
    x = mine(rank)
    seen = {"sum": hvd.allreduce(x, op=hvd.Sum), "average": hvd.allreduce(x),
            "min": hvd.allreduce(x, op=hvd.Min), "max": hvd.allreduce(x, op=hvd.Max),
            "product": hvd.allreduce(x, op=hvd.Product), "old": hvd.allreduce(x, average=False),
            "scaled": hvd.allreduce(x, op=hvd.Sum, prescale_factor=2., postscale_factor=.5),
            "whole": hvd.allreduce(mine(rank, dtype=torch.int64)),
            "fp16": hvd.allreduce(x, compression=hvd.Compression.fp16)}
    in_place = x.clone()
    seen["in place"] = hvd.allreduce_(in_place) is in_place and in_place
    strided = mine(rank, 6).view(2, 3).t()
    seen["strided"] = hvd.allreduce(strided)
    hvd.allreduce_(strided)
    seen["strided in place"] = strided
    seen["rows"] = hvd.allgather(torch.full((rank, 2), rank))
    seen["alike"] = hvd.allgather(torch.full((2,), rank))
    seen["empty"] = hvd.allgather(torch.empty(0, 3))
    seen["broadcast"] = hvd.broadcast(mine(rank), R - 1)
    there = mine(rank, 6).view(2, 3).t()
    seen["broadcast in place"] = hvd.broadcast_(there, 0) is there and there
    seen["grouped"] = hvd.grouped_allreduce([x, mine(rank, 3), mine(rank, 2, torch.float64)])
    seen["object"] = hvd.broadcast_object({"rank": rank, "text": "\u00e4" * rank}, R - 1)
    seen["objects"] = hvd.allgather_object([rank] * rank)
    seen["object of one"] = hvd.broadcast_object("lr 0.1" if rank == 0 else None)
    seen["objects of types"] = hvd.allgather_object("rank" if rank else None)
    seen["unchanged"] = torch.equal(x, mine(rank))
    return seen


def test_every_verb_is_right(R=3):
    xs = torch.stack([mine(r) for r in range(R)])
    whole = torch.stack([mine(r, dtype=torch.int64) for r in range(R)]).sum(0)
    strided = sum(mine(r, 6).view(2, 3).t() for r in range(R)) / R
    for seen in hvd_ranks(every_verb, ranks=R):
        for name in ("sum", "old", "scaled"):
            assert torch.equal(seen[name], xs.sum(0)), name
        for name in ("average", "in place", "fp16"):
            torch.testing.assert_close(seen[name], xs.mean(0), atol=2e-3, rtol=0)
        assert seen["fp16"].dtype == torch.float32
        assert torch.equal(seen["min"], xs.amin(0)) and torch.equal(seen["max"], xs.amax(0))
        assert torch.equal(seen["product"], xs.prod(0))
        assert torch.equal(seen["whole"], (whole.double() / R).trunc().long())
        torch.testing.assert_close(seen["strided"], strided)
        torch.testing.assert_close(seen["strided in place"], strided)
        assert torch.equal(seen["rows"], torch.cat([torch.full((r, 2), r) for r in range(R)]))
        assert torch.equal(seen["alike"], torch.arange(R).repeat_interleave(2))
        assert seen["empty"].shape == (0, 3)
        assert torch.equal(seen["broadcast"], mine(R - 1))
        assert torch.equal(seen["broadcast in place"], mine(0, 6).view(2, 3).t())
        for one, (n, dtype) in zip(seen["grouped"], ((7, torch.float32), (3, torch.float32),
                                                     (2, torch.float64))):
            torch.testing.assert_close(one, sum(mine(r, n, dtype) for r in range(R)) / R)
        assert seen["object"] == {"rank": R - 1, "text": "\u00e4" * (R - 1)}
        assert seen["objects"] == [[r] * r for r in range(R)]
        assert seen["object of one"] == "lr 0.1"
        assert seen["objects of types"] == [None] + ["rank"] * (R - 1)
        assert seen["unchanged"]


def test_a_rank_knows_its_place():
    def place(hvd):
        return (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(),
                hvd.cross_size(), hvd.is_initialized())

    assert hvd_ranks(place, ranks=4, nodes=2) == [
        (0, 4, 0, 2, 0, 2, True), (1, 4, 1, 2, 0, 2, True),
        (2, 4, 0, 2, 1, 2, True), (3, 4, 1, 2, 1, 2, True)]


def test_gradients_flow_back():
    def gradient(hvd):
        x = torch.tensor([1., 2.], requires_grad=True)
        (hvd.allreduce(x, op=hvd.Sum) * (hvd.rank() + 1)).sum().backward()
        return x.grad

    assert all(torch.equal(g, torch.tensor([3., 3.])) for g in hvd_ranks(gradient))


# --- any order of readiness ---------------------------------------------------------------------

def in_another_order(hvd, steps):
    """50 tensors of several types; each rank asks in an order of its own, in every step."""
    rank, order = hvd.rank(), random.Random(hvd.rank())
    wrong = []
    for step in range(steps):
        tensors = {f"t{i}": mine(rank + step + i, 1 + i % 9, (torch.float32, torch.float64)[i % 2])
                   for i in range(50)}
        names = list(tensors)
        order.shuffle(names)
        handles = {}
        for i, name in enumerate(names):
            handles[name] = hvd.allreduce_async(tensors[name], name=name, op=hvd.Sum)
            if i % 10 == rank:
                time.sleep(0.002)  # so that ranks are in different places
        for i, name in enumerate(tensors):
            right = sum(mine(r + step + i, 1 + i % 9) for r in range(hvd.size()))
            got = hvd.synchronize(handles[name])
            wrong += [name] * (not torch.equal(got.float(), right))
            assert hvd.poll(handles[name])
    return wrong


@pytest.mark.parametrize("R, settings", [
    (2, {}), (4, {"fusion_threshold": 64}),
    (4, {"cycle_time_ms": 5})], ids=str)
def test_ranks_that_are_ready_in_different_orders_end_right(R, settings):
    assert hvd_ranks(in_another_order, 3, ranks=R, **settings) == [[]] * R


def test_shapes_may_change_from_step_to_step():
    def grows(hvd):
        return [hvd.allreduce(torch.ones(1 + step // 2), name="x", op=hvd.Sum).tolist()
                for step in range(6)]

    assert hvd_ranks(grows, ranks=3)[2] == [[3.0] * n for n in (1, 1, 2, 2, 3, 3)]


# --- what it sends ------------------------------------------------------------------------------

def count(hvd, steps):
    """40 tensors of 100 float32 that become ready together; counts of each step."""
    seen = []
    for _ in range(steps):
        tensors = [torch.ones(100) for _ in range(40)]
        hvd.barrier()
        with hvd.counted() as counts:
            hvd.grouped_allreduce(tensors, name="g", op=hvd.Sum)
        dist.barrier()  # or another rank's next request would be counted where this one is slow
        seen.append((counts.data.calls["all_reduce"], counts.data.sent_bytes, counts.tensors))
    return seen


def test_fusion_saves_messages_not_bytes():
    def with_thresholds(*thresholds):
        import ranklab.horovod as hvd

        seen = []
        for threshold in thresholds:
            hvd.init(fusion_threshold=threshold)
            seen += count(hvd, 1)
            hvd.barrier()
            hvd.shutdown()
        return seen

    sent = 2 * 3 * 40 * 400 // 4
    for seen in launch(with_thresholds, 0, 400, 4000, 4399, 1 << 20, ranks=4):
        assert seen == [(calls, sent, 40) for calls in (40, 40, 4, 4, 1)]
