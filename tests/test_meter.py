"""Traffic counts exactly: against formulas, and against rings made of send and recv."""

import pytest
import torch
import torch.distributed as dist

from ranklab import device, launch
from ranklab.meter import Traffic

LENGTHS = (0, 1, 7, 12, 1001)  # 12 divides by 1, 2, 3, 4
WORLDS = (1, 2, 3, 4)


def counted(work, *args):
    with Traffic() as traffic:
        work(*args)
    return traffic


# --- every collective, against its formula ------------------------------------------------------


def collectives(length, dtype):
    """Name -> call. Each moves `length` elements per rank, or in all for the unsharded ones."""
    size = dist.get_world_size()
    root = size - 1

    def x(factor=1):
        return torch.ones(length * factor, dtype=dtype, device=device())

    def xs():
        return [x() for _ in range(size)]

    def at_root(make):
        return make() if dist.get_rank() == root else None

    def two(collective, *shapes):
        with dist._coalescing_manager():
            for _ in range(2):
                collective(*(x(factor) for factor in shapes))

    return {
        "all_reduce": lambda: dist.all_reduce(x()),
        "all_reduce async": lambda: dist.all_reduce(x(), async_op=True).wait(),
        "all_reduce two": lambda: two(dist.all_reduce, 1),
        "broadcast": lambda: dist.broadcast(x(), src=root),
        "reduce": lambda: dist.reduce(x(), dst=root),
        "all_gather": lambda: dist.all_gather(xs(), x()),
        "all_gather tensor": lambda: dist.all_gather_single(x(size), x()),
        "all_gather two": lambda: two(dist.all_gather_single, size, 1),
        "reduce_scatter": lambda: dist.reduce_scatter(x(), xs()),
        "reduce_scatter tensor": lambda: dist.reduce_scatter_single(x(), x(size)),
        "reduce_scatter two": lambda: two(dist.reduce_scatter_single, 1, size),
        "all_to_all": lambda: dist.all_to_all(xs(), xs()),
        "all_to_all tensor": lambda: dist.all_to_all_single(x(size), x(size)),
        "gather": lambda: dist.gather(x(), at_root(xs), dst=root),
        "scatter": lambda: dist.scatter(x(), at_root(xs), src=root),
        "barrier": lambda: dist.barrier(),
    }


def functional_collectives(length, dtype):
    import torch.distributed._functional_collectives as fc

    size, world = dist.get_world_size(), dist.group.WORLD

    def x(factor=1):
        return torch.ones(length * factor, dtype=dtype, device=device())

    return {  # + 1 makes each result wait
        "all_reduce": lambda: fc.all_reduce(x(), "sum", world) + 1,
        "all_reduce two": lambda: fc.all_reduce_coalesced([x(), x()], "sum", world),
        "broadcast": lambda: fc.broadcast(x(), size - 1, world) + 1,
        "all_gather": lambda: fc.all_gather_single(x(), 0, world) + 1,
        "all_gather two": lambda: fc.all_gather_single_coalesced([x(), x()], world),
        "reduce_scatter": lambda: fc.reduce_scatter_single(x(size), "sum", 0, world) + 1,
        "all_to_all": lambda: fc.all_to_all_single(x(size), None, None, world) + 1,
    }


def count_collectives():
    """{(name, length, bytes of an element): the one Op}"""
    seen = {}
    for make, lengths in ((collectives, LENGTHS), (functional_collectives, (7, 12))):
        for length in lengths:
            for dtype in (torch.float32, torch.bfloat16):
                for name, call in make(length, dtype).items():
                    traffic = counted(call)
                    assert len(traffic.ops) == 1, (make.__name__, name, traffic.ops)
                    seen[make.__name__, name, length, dtype.itemsize] = traffic.ops[0]
    return seen


def sent_by_all(name, size, n):
    """Bytes that all ranks together send; `n` bytes in one rank's part."""
    return {
        "all_reduce": 2 * (size - 1) * n,
        "broadcast": (size - 1) * n,
        "reduce": (size - 1) * n,
        "all_gather": (size - 1) * size * n,
        "reduce_scatter": (size - 1) * size * n,
        "all_to_all": (size - 1) * size * n,
        "gather": (size - 1) * n,
        "scatter": (size - 1) * n,
        "barrier": 0,
    }[name]


@pytest.mark.parametrize("size", WORLDS)
def test_collectives_cost_their_formula(size):
    ranks = launch(count_collectives, ranks=size)
    for key in ranks[0]:
        _, name, length, itemsize = key
        ops = [rank[key] for rank in ranks]
        kind, _, variant = name.partition(" ")
        n = length * itemsize * (2 if variant == "two" else 1)
        total = sent_by_all(kind, size, n)
        assert {op.name for op in ops} == {kind}
        assert {op.group for op in ops} == {tuple(range(size))}
        assert sum(op.sent_bytes for op in ops) == total, key
        assert sum(op.received_bytes for op in ops) == total, key
        if kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            # Alike on all ranks, but for one element of each tensor where N does not divide.
            slack = 0 if length % size == 0 or kind != "all_reduce" else 4 * itemsize
            assert all(abs(op.sent_bytes - total / size) <= slack for op in ops), key
            steps = (size - 1) * (2 if kind == "all_reduce" else 1)
            assert {op.messages for op in ops} == {steps if n or kind != "all_to_all" else 0}


def test_roots_and_ends():
    """The last of a chain sends nothing, its first receives nothing. gather, scatter: direct."""
    ranks = launch(count_collectives, ranks=4)  # root is rank 3
    n = 12 * 4

    def column(name, field):
        return [getattr(rank["collectives", name, 12, 4], field) for rank in ranks]

    assert column("broadcast", "sent_bytes") == [n, n, 0, n]
    assert column("broadcast", "received_bytes") == [n, n, n, 0]
    assert column("reduce", "sent_bytes") == [n, n, n, 0]
    assert column("reduce", "received_bytes") == [0, n, n, n]  # it begins at rank 0
    assert column("gather", "sent_bytes") == [n, n, n, 0]
    assert column("gather", "sent_to") == [((3, n),)] * 3 + [()]
    assert column("scatter", "sent_to") == [()] * 3 + [((0, n), (1, n), (2, n))]
    assert column("scatter", "messages") == [0, 0, 0, 3]
    assert column("all_gather", "payload_bytes") == [4 * n] * 4


# --- a real ring costs the same -----------------------------------------------------------------


def ring_all_reduce(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = list(x.clone().tensor_split(size))
    for step in range(2 * (size - 1)):
        out, into = chunks[(rank - 1 - step) % size], (rank - 2 - step) % size
        came = torch.empty_like(chunks[into])
        calls = [dist.P2POp(dist.isend, out, (rank + 1) % size),
                 dist.P2POp(dist.irecv, came, (rank - 1) % size)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        chunks[into] = chunks[into] + came if step < size - 1 else came
    return torch.cat(chunks)


def ring_beside_backend():
    pairs = []
    for length in (4, 7, 12, 1001):
        x = torch.arange(length, dtype=torch.float32, device=device())
        by_hand = counted(ring_all_reduce, x)
        by_backend = counted(dist.all_reduce, x.clone())
        pairs.append((by_hand, by_backend))
        assert torch.equal(ring_all_reduce(x), x * dist.get_world_size())
    return pairs


@pytest.mark.parametrize("size", (3, 4))
def test_a_real_ring_sends_what_the_formula_says_on_every_rank(size):
    for rank, pairs in enumerate(launch(ring_beside_backend, ranks=size)):
        for by_hand, by_backend in pairs:
            assert by_hand.sent_bytes == by_backend.sent_bytes
            assert by_hand.received_bytes == by_backend.received_bytes
            assert by_hand.sent_messages == by_backend.sent_messages
            assert by_hand.bytes_to == {(rank + 1) % size: by_hand.sent_bytes}
            assert by_hand.calls == {"send": 2 * (size - 1), "recv": 2 * (size - 1)}
            assert by_backend.bytes_to == {}


# --- what the learner sees ----------------------------------------------------------------------


def table_of_a_step():
    x = torch.ones(500, device=device())
    with Traffic() as traffic:
        dist.all_reduce(x)
        dist.all_reduce(x)
        dist.barrier()
    empty = Traffic()
    return traffic.table(), empty.table(), traffic


def test_the_table_lines_up_and_a_traffic_travels_back():
    table, empty, traffic = launch(table_of_a_step, ranks=2)[0]
    assert table.splitlines() == [
        "op          calls  tensor bytes  sent bytes  received bytes  messages",
        "all_reduce      2         4,000       4,000           4,000         4",
        "barrier         1             0           0               0         0",
        "sum             3         4,000       4,000           4,000         4",
    ]
    assert empty.splitlines()[1].split() == ["sum", "0", "0", "0", "0", "0"]
    assert traffic.calls == {"all_reduce": 2, "barrier": 1}
