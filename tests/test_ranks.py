"""Lab 00's library and project: shards, the ring, common decisions, the first job on a cluster."""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ranklab import launch
from ranklab.engine import RankError
from ranklab.meter import Traffic
from ranklab.projects.ranks import inspection as project
from ranklab.ranks import (
    all_ranks_finite, coordinates, pass_the_token, ring_shift, roll_call, shard_range,
)

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 64])
@pytest.mark.parametrize("n", [0, 1, 5, 63, 64, 1001])
def test_shards_are_numpys_array_split(n, size):
    parts = [list(shard_range(n, rank, size)) for rank in range(size)]
    assert parts == [part.tolist() for part in np.array_split(np.arange(n), size)]


def test_coordinates_are_what_launch_and_torchrun_set():
    def from_environment():
        import os
        return int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"])

    seen = launch(from_environment, ranks=6, nodes=3)
    assert seen == [coordinates(rank, 6, 3) for rank in range(6)]


@pytest.mark.parametrize("call, sentence", [
    ((0, 5, 2), "nodes=2 must divide ranks=5"),
    ((5, 4, 1), "rank=5 must be between 0 and ranks - 1 = 3"),
])
def test_coordinates_refuse(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        coordinates(*call)


def _ring_trial():
    x = torch.arange(12).view(3, 4).t() + 100 * dist.get_rank()  # not contiguous
    with Traffic() as traffic:
        token, shifted = pass_the_token(), ring_shift(x)
    return token, shifted, traffic.sent_messages, traffic.sent_bytes


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_the_ring_and_what_it_sends(size):
    for rank, (token, shifted, messages, sent) in enumerate(launch(_ring_trial, ranks=size)):
        assert token == (rank or size)
        right = torch.arange(12).view(3, 4).t() + 100 * ((rank - 1) % size)
        assert torch.equal(shifted, right)
        alone = size == 1
        assert (messages, sent) == ((0, 0) if alone else (2, 8 + 12 * 8))


def _in_a_group():
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    x = torch.tensor([dist.get_rank()])
    return (pass_the_token(group), ring_shift(x, group).item(),
            all_ranks_finite(x / (dist.get_rank() - 1), group))


def test_groups_count_their_own_ranks():
    assert launch(_in_a_group, ranks=4) == [None, (2, 3, False), None, (1, 1, False)]


def test_one_bad_rank_decides_for_all():
    def decide(bad):
        loss = torch.tensor(float("inf") if dist.get_rank() == bad else 3e38)
        return all_ranks_finite(loss), loss.item()

    assert [answer for answer, _ in launch(decide, 2, ranks=3)] == [False] * 3
    assert [answer for answer, _ in launch(decide, None, ranks=3)] == [True] * 3


def _come(absent, late):
    store = dist.PrefixStore("roll", dist.distributed_c10d._get_default_store())
    dist.barrier()
    if dist.get_rank() == absent:
        return None
    time.sleep(3 if dist.get_rank() == late else 0)
    with Traffic() as traffic:
        missing = roll_call(store, dist.get_rank(), dist.get_world_size(), 1)
    return missing, sum(traffic.calls.values())


@pytest.mark.parametrize("absent, late, missing", [(None, None, []), (0, 2, [0, 2])])
def test_the_roll_call_is_one_list_on_all_ranks(absent, late, missing):
    found = launch(_come, absent, late, ranks=4)
    assert found == [None if rank == absent else (missing, 0) for rank in range(4)]


def test_the_project_finds_nothing_wrong_where_nothing_is():
    found = project.run(ranks=4, nodes=2)
    assert [r["node"] for r in found["ranks"]] == [0, 0, 1, 1]
    assert all(r["right"] for r in found["ranks"])
    assert [size for size, _ in found["times"]] == list(project.SIZES)
    assert found["table"].startswith("The library's: roll_call, ring_shift.\n")


def test_the_project_runs_a_learners_functions():
    def no_ring(x, group=None):
        return x.clone()

    found = project.run(ranks=2, ring_shift=no_ring, roll_call=roll_call)
    assert found["table"].startswith("Yours: ring_shift. The library's: roll_call.\n")


def _rank(number, compute_s, torch_version="2.13.0", right=True):
    return project.Rank(number, 0, number, "host", "cpu", torch_version, right, compute_s, 0.001)


def test_problems_are_named():
    assert project.problems([_rank(r, 0.02) for r in range(4)]) == []
    seen = [_rank(0, 0.02), _rank(1, 0.09), _rank(2, 0.02, right=False), _rank(3, 0.02, "2.12.0")]
    wrong, versions, slow = project.problems(seen)
    assert "rank 2" in wrong and "rank 3 2.12.0" in versions and "rank 1" in slow and "4.5" in slow


def test_a_slow_rank_is_named():
    found = project.run(ranks=3, slow=1)
    assert any(p.startswith("rank 1 ") and "computes" in p for p in found["problems"])


def test_a_missing_rank_is_named():
    with pytest.raises(RankError, match="rank 2 of 3 did not answer the roll call within 1 s"):
        project.run(ranks=3, missing=2, limit_s=1)
