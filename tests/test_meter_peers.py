"""Traffic names peers and groups by global rank, and counts threads and nested blocks once each."""

import threading

import torch
import torch.distributed as dist

from ranklab import device, launch
from ranklab.meter import Traffic


def counted(work, *args):
    with Traffic() as traffic:
        work(*args)
    return traffic


# --- peers, groups, objects ---------------------------------------------------------------------


def peers_and_groups():
    """On 4 ranks. Group members are named by global rank, everywhere."""
    rank, seen = dist.get_rank(), {}
    odd, late = dist.new_group([1, 3]), dist.new_group([2, 3])
    x = torch.ones(5, device=device())
    splits = [[0, 1, 2, 3][(peer - rank) % 4] for peer in range(4)]  # k rows to the k-th next rank
    came = [[0, 1, 2, 3][(rank - peer) % 4] for peer in range(4)]
    rows = torch.ones(6, 3, device=device())
    seen["uneven"] = counted(dist.all_to_all_single, rows.clone(), rows, came, splits)

    def in_group():
        if rank in (2, 3):
            dist.send(x, 2, group=late) if rank == 3 else dist.recv(x, 3, group=late)
        if rank in (1, 3):
            dist.send(x, 3, group=odd) if rank == 1 else dist.recv(x, group=odd)
            dist.all_reduce(x, group=odd)
            dist.broadcast(x, src=3, group=odd)

    seen["groups"] = counted(in_group)
    seen["objects"] = counted(dist.all_gather_object, [None] * 4, {"rank": rank})
    return seen


def test_peers_are_global_ranks_and_splits_and_objects_are_exact():
    ranks = launch(peers_and_groups, ranks=4)
    row = 3 * 4
    for rank, seen in enumerate(ranks):
        expected = {(rank + k) % 4: k * row for k in (1, 2, 3)}
        assert seen["uneven"].bytes_to == expected
        assert seen["uneven"].sent_bytes == seen["uneven"].received_bytes == 6 * row
    one, two, three = (ranks[rank]["groups"] for rank in (1, 2, 3))
    assert ranks[0]["groups"].ops == []
    assert one.bytes_to == {3: 20} and three.bytes_to == {2: 20}
    assert [op.peer for op in two.ops] == [3]
    assert [op.peer for op in three.ops] == [2, None, None, None]  # None: recv from anyone
    # all_reduce of 20 bytes on two ranks: 5 elements in chunks of 3 and 2, each sent once
    assert one.bytes_in == {(1, 3): 20 + 20} and three.bytes_in == {(2, 3): 20, (1, 3): 20 + 20}
    assert {op.group_size for op in one.ops} == {2}
    for rank in ranks:
        sizes, data = rank["objects"].ops  # all_gather_object: first the lengths, one int64 each
        assert sizes.name == data.name == "all_gather"
        assert sizes.sent_bytes == 3 * 8 and data.sent_bytes > 3 * 10


# --- threads and nesting ------------------------------------------------------------------------


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def threads_and_nesting():
    x = torch.ones(6, device=device())
    seen = {}

    def reduce():
        dist.all_reduce(x)

    def watched(traffic):
        with traffic.in_thread(), traffic.in_thread():
            reduce()

    with Traffic() as seen["unwatched"]:
        in_a_thread(reduce)
    with Traffic() as seen["watched"]:
        in_a_thread(lambda: watched(seen["watched"]))
        watched(seen["watched"])  # a thread that is counted already is not counted twice
    with Traffic() as seen["outer"]:
        reduce()
        with Traffic() as seen["inner"]:
            reduce()
    with seen["inner"]:
        reduce()
    return {name: dict(traffic.calls) for name, traffic in seen.items()}


def test_threads_enter_the_meter_and_blocks_nest():
    for seen in launch(threads_and_nesting, ranks=2):
        assert seen == {"unwatched": {}, "watched": {"all_reduce": 2},
                        "outer": {"all_reduce": 2}, "inner": {"all_reduce": 2}}
