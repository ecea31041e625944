"""Lab 03's parts beside torch's: buckets, copies of a DTensor, batch norm, uneven batches."""

import copy

import pytest
import torch
import torch.distributed as dist
from data_parallel_models import difference
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ranklab import device, launch
from ranklab.data_parallel import (
    OverlappedDataParallel, SyncBatchNorm, assign_buckets, convert_sync_batch_norm, join_uneven,
    plan, replicas_agree,
)
from ranklab.engine import RankError

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]


def said_by(call):
    """What call() returns, or the sentence of its ValueError."""
    try:
        return call()
    except ValueError as error:
        return str(error)


def _agree_as_dtensors():
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    mesh, rank, seen = init_device_mesh(device().type, (2,)), dist.get_rank(), []
    local = torch.arange(6.0, device=device()).view(3, 2)
    for placement, change in ((Replicate(), 0), (Replicate(), rank), (Shard(0), 0)):
        model = nn.Linear(1, 1)
        model.weight = nn.Parameter(DTensor.from_local(local + change, mesh, [placement],
                                                       run_check=False))
        seen.append(said_by(lambda: replicas_agree(model)))
    return seen


def test_replicas_agree_on_copies_of_a_dtensor_and_refuses_its_shards():
    for seen in launch(_agree_as_dtensors, ranks=2):
        assert seen == [True, False, "replicas_agree: weight is (Shard(dim=0),), so no rank holds "
                        "a copy of it; compare its full_tensor()"]


def test_buckets_are_torchs():
    random = torch.Generator().manual_seed(0)
    for cap in (1, 40, 100, 1000):
        sizes = torch.randint(1, 60, (40,), generator=random).tolist()
        given = [nn.Parameter(torch.zeros(n)) for n in sizes]
        order = given[::-1]  # torch's own rule, on the list that backward gives
        indices, _ = dist._compute_bucket_assignment_by_size(
            order, [cap], [False] * len(order), list(range(len(order))))
        right = [[order[i] for i in bucket] for bucket in indices]
        assert [[*map(id, b)] for b in assign_buckets(given, cap)] == [[*map(id, b)] for b in right]


# --- batch norm -----------------------------------------------------------------------------------

def _converted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.ReLU(),
                          nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.Flatten()),
                          nn.BatchNorm1d(64, track_running_stats=False)).double().to(device())
    alone, names = copy.deepcopy(model), list(model.state_dict())
    assert convert_sync_batch_norm(model, dist.new_group()) is model
    assert list(model.state_dict()) == names
    wrapped, R = OverlappedDataParallel(model, find_unused_parameters=True), dist.get_world_size()
    for step in range(3):
        x = torch.randn(12, 1, 6, 6, dtype=torch.float64,
                        generator=torch.Generator().manual_seed(step)).to(device())
        for net, rows in ((alone, x), (wrapped, x.chunk(R)[dist.get_rank()])):
            net.zero_grad()
            net(rows).square().mean().backward()
    trained = difference(model, alone)
    return trained, (model.eval()(x) - alone.eval()(x)).abs().max().item()


def test_a_converted_model_trains_as_one_process_does_in_a_group_of_its_own():
    for trained, evaluated in launch(_converted, ranks=3):
        assert trained < 1e-12 and evaluated < 1e-12


def test_a_single_batch_norm_is_replaced():
    made = convert_sync_batch_norm(nn.BatchNorm1d(3).eval())
    assert isinstance(made, SyncBatchNorm) and not made.training
    assert convert_sync_batch_norm(made) is made


def _too_few(of_ranks):
    norm = SyncBatchNorm(2).to(device())
    said = [said_by(lambda: str(len(norm(torch.ones(rows[dist.get_rank()], 2, device=device())))))
            for rows in of_ranks]
    return said, torch.stack([norm.running_mean, norm.running_var]).isfinite().all().item()


def test_one_value_has_no_variance_and_every_rank_says_so():
    few = "values in a channel of all ranks must be at least 2"
    for rank, seen in enumerate(launch(_too_few, [(1, 0, 0), (0, 0, 0), (1, 1, 0)], ranks=3)):
        assert seen == ([f"n=1 {few}", f"n=0 {few}", str((1, 1, 0)[rank])], True)


# --- uneven batches -------------------------------------------------------------------------------

def tied():
    """Two tied layers, a frozen one, a batch norm with its buffers."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[3].requires_grad_(False)
    return model.to(device())


def _batches(count):
    random = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(3, 4, generator=random).to(device()) for _ in range(count)]


def _joined(counts_of_case, find_unused_parameters):
    differences = []
    for counts in counts_of_case:
        mine, theirs, batches = tied(), tied(), _batches(counts[dist.get_rank()])
        ours = OverlappedDataParallel(mine, 32, find_unused_parameters=find_unused_parameters)
        torch_ddp = TorchDDP(theirs, find_unused_parameters=find_unused_parameters)

        def train(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for x in batches:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

        train(ours, join_uneven(batches, ours))
        with Join([torch_ddp]):
            train(torch_ddp, batches)
        differences.append(max((a - b).abs().max().item() for a, b in zip(
            mine.state_dict().values(), theirs.state_dict().values())))
        assert replicas_agree(mine)
    return max(differences)


@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_uneven_batches_end_as_with_torchs_join(find_unused_parameters):
    cases = (0, 3, 3, 1), (2, 1, 0, 0)
    assert max(launch(_joined, cases, find_unused_parameters, ranks=4)) < 1e-6


def _accumulates_inside():
    model = OverlappedDataParallel(tied())
    for x in join_uneven(_batches(1 + dist.get_rank()), model):
        with model.no_sync():
            model(x).sum().backward()


def test_no_sync_inside_is_refused():
    with pytest.raises(RankError, match="no_sync inside join_uneven"):
        launch(_accumulates_inside, ranks=2)


def _batch_norm_inside(kind):
    model = OverlappedDataParallel(nn.Sequential(nn.Linear(4, 4), kind(4)))
    for x in join_uneven(_batches(dist.get_rank()), model):
        model(x).sum().backward()


def test_a_batch_norm_over_ranks_inside_is_refused_on_every_rank():
    def both():
        return [said_by(lambda: _batch_norm_inside(kind))
                for kind in (SyncBatchNorm, nn.SyncBatchNorm)]

    for said in launch(both, ranks=3):
        assert all(each.startswith("a SyncBatchNorm inside join_uneven: it would") for each in said)


def test_times_of_buckets_are_those_of_one_link():
    case = [1.0, 2.0, 3.0], [5, 5, 5], 0.5, 0.1
    assert plan.bucket_times([[0], [1, 2]], *case) == [(1.0, 2.0), (3.0, 4.5)]
    assert plan.exposed_seconds([[0], [1], [2]], *case) == 1.0
    assert plan.capped_buckets([5, 5, 5, 1], 10) == [[0, 1], [2, 3]]
