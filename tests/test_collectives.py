"""Lab 02's library and project: right for every size, exactly the fewest bytes, the cost model."""

import tempfile
import time

import pytest
import torch
import torch.distributed as dist

from ranklab import collectives as c
from ranklab import launch
from ranklab.collectives.emulate import EmulatedLinks
from ranklab.collectives.watch import Message, Watch, marked
from ranklab.engine import RankError
from ranklab.meter import Traffic
from ranklab.peers import mpi
from ranklab.plots import collectives as plots
from ranklab.projects.collectives import links
from ranklab.projects.collectives import timing as project

pytestmark = pytest.mark.timeout(120)

TYPES = (torch.float32, torch.bfloat16, torch.int64)


def _input(n, rank, dtype, strided=False):
    """Whole numbers, exact in bfloat16 in any order of the sum."""
    x = ((torch.arange(n) * 5 + rank * 7) % 11 - 5).to(dtype)
    return x.reshape(2, -1).t() if strided else x


def _all_right(R):
    """On one rank: every plain verb, length, type and root; returns what was wrong."""
    rank, wrong = dist.get_rank(), []
    cases = [(n, False) for n in sorted({0, 1, 1009, R - 1, 24})] + [(24, True)]
    for dtype in TYPES:
        for n, strided in cases if dtype is torch.float32 else cases[-2:]:
            xs = [_input(n, r, dtype, strided) for r in range(R)]
            x, total = xs[rank], sum(xs)
            before = x.clone()
            for name, got, right in _results(x, xs, total, R, rank):
                if got is None or got.dtype != dtype or not torch.equal(got, right):
                    wrong.append(f"{name} n={n} strided={strided} {dtype}")
            if not torch.equal(x, before):
                wrong.append(f"x changed, n={n} {dtype}")
    return wrong


def _results(x, xs, total, R, rank):
    yield "all_reduce", c.all_reduce(x), total
    yield "all_gather", c.all_gather(x), torch.stack(xs)
    pieces = [torch.stack([y * (k + 1) for k in range(R)]) for y in xs]  # (R, ...)
    yield "all_to_all", c.all_to_all(pieces[rank]), torch.stack([p[rank] for p in pieces])
    yield "reduce_scatter", c.reduce_scatter(pieces[rank]), total * (rank + 1)
    for root in {0, R // 2, R - 1} if x.dtype is torch.float32 else {R - 1}:
        yield "broadcast", c.broadcast(x, root), xs[root]
        mine = pieces[rank] if rank == root else None
        yield "scatter", c.scatter(mine, x, root), pieces[root][rank]
        gathered, reduced = c.gather(x, root), c.reduce(x, root)
        if rank == root:
            yield "gather", gathered, torch.stack(xs)
            yield "reduce", reduced, total
        elif gathered is not None or reduced is not None:
            yield "gather or reduce on another rank", None, None


@pytest.mark.parametrize("R", [1, 2, 5, *(pytest.param(R, marks=pytest.mark.sweep)
                                          for R in (3, 4, 6, 7, 8))])
def test_every_verb_is_right(R):
    assert launch(_all_right, R, ranks=R, timeout=100) == [[]] * R


def _sent(n):
    x, counted = torch.zeros(n), {}
    for name in ("all_reduce", "all_to_all"):
        arg = x.view(dist.get_world_size(), -1) if name == "all_to_all" else x
        with Traffic() as traffic:
            getattr(c, name)(arg)
        counted[name] = traffic.sent_bytes, traffic.sent_messages
    return counted


@pytest.mark.parametrize("R", [1, 3])
def test_bytes_and_messages_are_the_formulas(R):
    n = 24 * 8
    for rank, counted in enumerate(launch(_sent, n, ranks=R)):
        busy = R - 1 if rank == 0 else 1 if R > 1 else 0
        assert counted["all_to_all"] == (4 * n * (R - 1) // R, R - 1)
        assert counted["all_reduce"] == (busy * 4 * n, busy)


def _uneven(R, case):
    """Ours beside torch's own, and what was sent: bytes, messages."""
    rank = dist.get_rank()
    lengths = [[(3 * i + 5 * j + case) % 7 * (case != 2) for j in range(R)] for i in range(R)]
    mine = [torch.arange(10.0 * n) + 100 * rank + to for to, n in enumerate(lengths[rank])]
    come = [10 * row[rank] for row in lengths]
    theirs = torch.empty(sum(come))
    dist.all_to_all_single(theirs, torch.cat(mine), come, [len(each) for each in mine])
    with Traffic() as traffic:
        ours = c.all_to_all_v(mine)
    assert [len(each) for each in ours] == come and torch.equal(torch.cat(ours), theirs)
    away = [each for to, each in enumerate(mine) if to != rank and len(each)]
    assert traffic.sent_messages == len(away) + R - 1
    assert traffic.sent_bytes == sum(each.nbytes for each in away) + 8 * (R - 1)
    return 4 * torch.tensor([[10 * n for n in row] for row in lengths])


@pytest.mark.parametrize("R", [1, 3])
def test_pieces_of_any_length_arrive_as_torchs(R):
    def all_cases():
        return [_uneven(R, case) for case in range(3)]

    for nbytes in launch(all_cases, ranks=R)[0]:
        nbytes.fill_diagonal_(0)
        bound = max(nbytes.sum(0).max(), nbytes.sum(1).max())  # into one rank, or out of it
        assert c.all_to_all_v_time(nbytes.tolist(), 0, 1) == bound + 8 * (R - 1)
    even = [[5.0] * R] * R
    assert c.all_to_all_v_time(even, 1, 0) == 2 * (R - 1)


def test_a_barrier_holds_everybody_until_the_last():
    def order():
        with Traffic() as traffic:
            c.barrier()
        return traffic.sent_messages

    assert launch(order, ranks=5) == [3] * 5


def test_floats_agree_on_all_ranks_and_with_torch():
    def both():
        x = torch.randn(1001, generator=torch.Generator().manual_seed(dist.get_rank()))
        theirs = x.clone()
        dist.all_reduce(theirs)
        inside, across = c.node_groups(2)
        return theirs, c.ring_all_reduce(x), c.recursive_doubling(x), \
            c.hierarchical_all_reduce(x, inside, across)

    seen = launch(both, ranks=4)
    for theirs, *ours in seen:
        for mine, first in zip(ours, seen[0][1:]):
            assert torch.allclose(mine, theirs, atol=1e-5)
            assert torch.equal(mine, first)

def _in_trees(total=8, n=1001):
    """On this rank's part of the contributions: the sum in the tree, by += and a ring; the cost."""
    rows = torch.randn(total, n, generator=torch.Generator().manual_seed(0))
    own = rows.chunk(dist.get_world_size())[dist.get_rank()]
    before = own.clone()
    with Traffic() as traffic:
        tree = c.invariant_all_reduce(own)
    assert torch.equal(own, before)
    added = own[0].clone()
    for row in own[1:]:
        added += row
    with Traffic() as even:  # of a length that R divides
        c.invariant_all_reduce(own[:, :1000])
    return tree, c.ring_all_reduce(added), (even.sent_bytes, traffic.sent_messages)


@pytest.mark.parametrize("total", [8, 24])
def test_the_tree_has_the_same_bits_on_any_number_of_ranks_and_a_ring_has_not(total):
    rows = torch.randn(total, 1001, generator=torch.Generator().manual_seed(0))
    due, rings = c.tree_sum(rows), []
    for R in (1, 2, 4, 8):
        for tree, ring, cost in launch(_in_trees, total, ranks=R):
            assert torch.equal(tree, due)
            assert cost == (2 * (R - 1) * 4000 // R, 2 * (R.bit_length() - 1))
        rings.append(ring)
        torch.testing.assert_close(ring, due, rtol=0, atol=1e-5)
    assert not any(torch.equal(rings[0], ring) for ring in rings[1:])


def test_the_tree_of_eight_is_the_one_in_the_lab():
    c0, c1, c2, c3, c4, c5, c6, c7 = rows = torch.randn(8, 999)
    assert torch.equal(c.tree_sum(rows), ((c0 + c1) + (c2 + c3)) + ((c4 + c5) + (c6 + c7)))
    assert torch.equal(c.tree_sum(rows[:3]), c0 + (c1 + c2))


# --- bad input ----------------------------------------------------------------------------------

def _bad_peer():
    x = torch.zeros(1)
    c.sendrecv(x, dist.get_world_size(), x, 0)


def test_bad_input_on_ranks_is_a_sentence():
    with pytest.raises(RankError, match="rank 2 is not one of the 2 ranks 0 to 1"):
        launch(_bad_peer, ranks=2)
    with pytest.raises(RankError, match="per_node=2 must divide the 3 ranks of the group"):
        launch(c.node_groups, 2, ranks=3)
    with pytest.raises(RankError, match="the tree needs 1, 2, 4, 8, ... ranks, not 3"):
        launch(c.invariant_all_reduce, torch.ones(2, 3), ranks=3)
    with pytest.raises(RankError, match="Watch follows 8 ranks or fewer, not 9"):
        launch(Watch, ranks=9)


@pytest.mark.parametrize("call, sentence", [
    (lambda: c.alpha_beta_time("rign", 1, 2, 0, 0), "algorithm 'rign' is not one of ring, recur"),
    (lambda: c.fit_alpha_beta([8, 8], [1, 2]), "needs two different sizes or more, not 1"),
    (lambda: c.bus_factor("all_gathr", 4), "verb 'all_gathr' is not one of all_reduce"),
    (lambda: c.Link(-1, 0), "alpha=-1 and beta=0 must not be negative"),
    (lambda: project.run(verbs=("all_reduce", "gossip")), "verb 'gossip' is not one of"),
])
def test_bad_input_is_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


# --- the cost model -----------------------------------------------------------------------------

@pytest.mark.parametrize("R", [2, 3, 4, 5, 8, 100])
def test_a_ring_takes_as_long_as_the_bytes_of_its_busiest_link(R):
    assert c.alpha_beta_time("ring", 8, R, 0, 1) == pytest.approx(c.bus_factor("all_reduce", R) * 8)


def test_hierarchical_wins_only_where_links_differ():
    times = links.model([1, 2, 4, 16])
    flat, layered = times["flat ring"], times["hierarchical"]
    assert flat[0] < layered[0] and flat[1] == pytest.approx(layered[1])
    assert flat[2] > layered[2] and flat[3] / layered[3] > flat[2] / layered[2]


@pytest.mark.parametrize("nodes", [2, 4, 16, 32])
def test_hierarchical_meets_one_flat_ring_at_the_number_of_nodes(nodes):
    fast, slow = c.Link(0, 1e-9), c.Link(0, nodes * 1e-9)
    flat, layered = (time_of(1e6, nodes, 8, fast, slow)
                     for time_of in (c.flat_ring_time, c.hierarchical_time))
    assert flat == pytest.approx(layered)


def test_the_slow_link_and_the_first_message_look_different():
    messages = [[Message(0, 0, 1, 0, frozenset([0]))], [Message(0, 1, 0, 1, frozenset([1]))]]
    start, step = plots.steps(messages, 2, nodes=2).axes[:2]
    assert [type(mark).__name__ for mark in start.patches] == ["Circle", "Circle"]
    assert {(type(mark).__name__, mark.get_linestyle()) for mark in step.patches} == {
        ("Rectangle", (0, (1.6, 1)))}


def test_emulated_links_change_no_value():
    def slowly(folder):
        groups, link = c.node_groups(2), c.Link(0.001, 1e-9)
        with EmulatedLinks(link, link, 2, folder), Traffic() as traffic:
            total = c.hierarchical_all_reduce(torch.full((8,), dist.get_rank() + 1), *groups)
        return total.tolist(), traffic.sent_messages

    with tempfile.TemporaryDirectory() as folder:
        assert launch(slowly, folder, ranks=4, nodes=2) == [([10] * 8, 4)] * 4


def test_an_emulated_collective_takes_the_time_of_its_slowest_link():
    """30 ms a message between nodes; a group inside of one has no part in it."""

    def times(folder):
        inside, _ = c.node_groups(2)
        found, slept, ones, sleep = [], [], torch.ones(8), time.sleep
        verbs = (lambda: dist.all_reduce(ones.clone()),
                 lambda: dist.reduce_scatter_single(torch.empty(2), ones),
                 lambda: dist.all_reduce(ones.clone(), group=inside))
        with EmulatedLinks(c.Link(0, 0), c.Link(0.03, 0), 2, folder), \
                pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
            for verb in verbs:
                dist.barrier()
                began, slept[:] = time.perf_counter(), []
                verb()
                found.append((began, time.perf_counter(), sum(slept)))
        return found

    with tempfile.TemporaryDirectory() as folder:
        *whole, inside = zip(*launch(times, folder, ranks=4, nodes=2))
    for messages, ranks in zip((6, 3), whole):  # of a ring of 4
        begun, ended, asleep = zip(*ranks)
        assert asleep == pytest.approx((0, messages * 0.03) * 2)  # 1 and 3 send to the other node
        assert min(ended) >= max(begun[1], begun[3]) + messages * 0.03, "all wait for them"
    assert [asleep for _, _, asleep in inside] == [0] * 4


# --- project and figures ------------------------------------------------------------------------

def test_the_project_finds_nothing_wrong():
    rows = project.run(ranks=4, nodes=2, sizes=(512, 8192), iters=1)
    assert [r for r in rows if r.wrong] == []
    assert {r.algorithm for r in rows if r.verb == "all_reduce"} == {
        "ring", "recursive_doubling", "server", "hierarchical", "gloo"}
    for row in rows:
        assert row.busbw == pytest.approx(row.size / row.time * c.bus_factor(row.verb, 4))
    text = project.table(rows)
    for column in ("size", "count", "type", "time", "algbw", "busbw", "#wrong"):
        assert column in text.splitlines()[0]
    assert "all_reduce by ring" in project.summary(rows) and "crossover" in project.summary(rows)


def test_the_project_runs_a_learners_functions_and_says_so():
    def backwards(pieces, group=None):
        return c.all_to_all_v(pieces, group)[::-1]  # wrong, and found

    how = {"ranks": 2, "sizes": (512,), "iters": 1}
    mine = {"all_to_all_v": backwards, "ring_all_reduce": c.ring_all_reduce}
    rows = project.run(verbs=("all_reduce", "all_to_all"), **how, **mine)
    assert {r.algorithm: r.wrong > 0 for r in rows if r.of_learner} == {"any_lengths": True}
    assert not any(r.wrong for r in rows if not r.of_learner)
    text = project.table(rows)
    assert "Yours: all_to_all_v. The library's: ring_all_reduce, " in text
    with pytest.raises(TypeError, match="no function here is called ring"):
        project.run(**how, ring=c.ring_all_reduce)


def test_the_crossover_is_where_the_lines_meet():
    assert project.measured_crossover({"ring": (3.0, 1.0), "recursive_doubling": (1.0, 2.0)}) == 2.0
    lines = {"ring": (1.0, 1.0), "recursive_doubling": (3.0, 2.0)}
    assert project.measured_crossover(lines) is None


def test_mpi_gives_the_same_numbers_or_says_what_is_missing(monkeypatch):
    with monkeypatch.context() as here:
        here.setattr(mpi, "is_here", lambda: False)
        assert "pip install 'ranklab[mpi]'" in mpi.mpirun(2)
    if not mpi.is_here():
        pytest.skip("needs mpirun and mpi4py")
    lines = mpi.mpirun(2, "-m", "ranklab.projects.collectives", "--mpi", "--sizes", "1K", "--iters",
                       "1").splitlines()
    assert len(lines) == 2 + len(project.VERBS)
    assert all(line.split()[-1] == "0" for line in lines[2:])


def test_a_ring_passes_what_it_has_and_sums_for_half_of_its_steps():
    def watched():
        with Watch() as ring:
            c.ring_all_reduce(marked(4))
        return ring.messages

    for rank, messages in enumerate(launch(watched, ranks=4)):
        assert [m.step for m in messages] == list(range(6))
        assert {m.to for m in messages} == {(rank + 1) % 4}
        assert [len(m.summed) for m in messages] == [1, 2, 3, 4, 4, 4]
