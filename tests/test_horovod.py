"""ranklab.horovod: values, any order of readiness, what it sends, join, process sets."""

import random
import time

import pytest
import torch
import torch.distributed as dist

from ranklab import launch

WORLD_SIZES = (1, 2, 3, 4)


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


@pytest.mark.parametrize("R", WORLD_SIZES)
def test_every_verb_is_right(R):
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
    (2, {}), (3, {"cache_capacity": 0}), (4, {"cache_capacity": 20, "fusion_threshold": 64}),
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
        seen.append((counts.data.calls["all_reduce"], counts.data.sent_bytes, counts.tensors,
                     dict(counts.negotiation.calls), counts.name_cycles))
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
        return [(calls, sent, tensors) for calls, sent, tensors, *_ in seen]

    sent = 2 * 3 * 40 * 400 // 4
    for seen in launch(with_thresholds, 0, 400, 4000, 4399, 1 << 20, ranks=4):
        assert seen == [(calls, sent, 40) for calls in (40, 40, 4, 4, 1)]


@pytest.mark.parametrize("capacity, later", [(1024, 0), (40, 0), (0, 1)])
def test_cached_names_are_not_sent_again(capacity, later):
    for first, *others in hvd_ranks(count, 3, ranks=3, cache_capacity=capacity):
        assert first[4] >= 1 and first[3]["gather"] >= 1
        for _, _, _, calls, name_cycles in others:
            if later:
                assert name_cycles >= 1 and calls["broadcast"] >= 2
            else:
                assert name_cycles == 0 and set(calls) == {"all_reduce"}


def test_a_cycle_of_cached_names_costs_one_bit_for_each():
    def bytes_of_a_cycle(hvd):
        for _ in range(4):  # a rank may see the end of the first negotiation in the second call
            with hvd.counted() as counts:
                hvd.grouped_allreduce([torch.ones(1)] * 160, name="g")
            dist.barrier()  # as above
        return {op.payload_bytes for op in counts.negotiation.ops}

    from ranklab.horovod.cost import negotiation_bytes

    assert hvd_ranks(bytes_of_a_cycle) == [{negotiation_bytes(160, 64)}] * 2 == [{21}] * 2


def test_more_names_than_the_cache_holds():
    def many(hvd):
        return [hvd.allreduce(torch.tensor([float(i)]), name=f"n{i % 7}", op=hvd.Sum).item()
                for i in range(30)]

    assert hvd_ranks(many, ranks=3, cache_capacity=3) == [[3.0 * i for i in range(30)]] * 3


# --- join, process sets -------------------------------------------------------------------------


def uneven(hvd):
    """Rank r has r + 2 batches. (last rank to join, the averages that it saw)."""
    seen = [hvd.allreduce(torch.ones(3), name="x")[0].item() for _ in range(hvd.rank() + 2)]
    last = hvd.join()
    again = hvd.allreduce(torch.tensor([1.0])).item()
    return last, again, seen


@pytest.mark.parametrize("R, capacity", [(1, 9), (2, 0), (3, 9), (4, 0), (4, 9)])
def test_join_with_uneven_batches(R, capacity):
    for rank, (last, again, seen) in enumerate(hvd_ranks(uneven, ranks=R,
                                                         cache_capacity=capacity)):
        taking_part = [sum(r + 2 > step for r in range(R)) for step in range(rank + 2)]
        assert seen == pytest.approx([n / R for n in taking_part])
        assert (last, again) == (R - 1, 1.0)


@pytest.mark.parametrize("verb", ["broadcast", "allgather"])
def test_a_joined_rank_has_no_part_in_a_cached_broadcast_or_allgather(verb):
    def joins_early(hvd):
        call = {"broadcast": lambda one: hvd.broadcast(mine(hvd.rank()), 0, "w", one),
                "allgather": lambda one: hvd.allgather(mine(hvd.rank()), "w", one)}[verb]
        others = hvd.add_process_set([0, 2])
        hvd.allreduce(torch.ones(1), name="x")
        call(hvd.global_process_set)  # now they are in the cache
        if hvd.rank() != 1:
            time.sleep(0.2)  # rank 1 has joined
            for _ in range(2):
                with pytest.raises(ValueError, match=f"{verb} of 'w': rank 1 joined"):
                    call(hvd.global_process_set)
                assert torch.equal(call(others)[:7], mine(0))  # rank 1 has no part in it
            assert hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum).item() == 2
        return hvd.join() != 1, torch.equal(call(hvd.global_process_set)[:7], mine(0))

    # Not after half of stall_check, which would be too late for this launch.
    assert hvd_ranks(joins_early, ranks=3, stall_check=100, stall_shutdown=200) == [(True,) * 2] * 3


def test_work_on_cached_tensors_is_no_stall_of_a_join():
    def much_longer(hvd):
        hvd.allreduce(torch.ones(1), name="x")
        if hvd.rank() != 1:
            for _ in range(50):
                time.sleep(0.04)  # 2 s together, and stall_shutdown is 1
                hvd.allreduce(torch.ones(1), name="x")
        return hvd.join() != 1

    assert hvd_ranks(much_longer, ranks=3, stall_check=0.8, stall_shutdown=1) == [True] * 3


def test_process_sets():
    def halves(hvd):
        even, odd = hvd.ProcessSet([0, 2]), hvd.add_process_set([1, 3])
        hvd.add_process_set(even)
        ours = even if even.included() else odd
        seen = []
        for _ in range(3):  # from the second time on they are cached
            one = hvd.allreduce(torch.tensor([hvd.rank() * 1.0]), name="x", op=hvd.Sum,
                                process_set=ours)
            rows = hvd.allgather(torch.tensor([hvd.rank()]), name="y", process_set=ours)
            everybody = hvd.allreduce(torch.ones(1), name="all", op=hvd.Sum)
            root = hvd.broadcast(torch.tensor([hvd.rank()]), ours.ranks[1], process_set=ours)
            seen.append((one.item(), rows.tolist(), everybody.item(), root.item()))
        assert (ours.size(), ours.rank()) == (2, hvd.rank() // 2)
        with pytest.raises(ValueError, match="is not in the process set of ranks"):
            hvd.allreduce(torch.ones(1), process_set=odd if ours is even else even)
        with pytest.raises(ValueError, match=r"process set of ranks \[1, 3\] already"):
            hvd.add_process_set([3, 1])
        with pytest.raises(ValueError, match="different numbers from 0 to 3"):
            hvd.add_process_set([1, 4])
        return seen

    a, b, c, d = hvd_ranks(halves, ranks=4)
    assert a == c == [(2.0, [0, 2], 4.0, 2)] * 3
    assert b == d == [(4.0, [1, 3], 4.0, 3)] * 3
