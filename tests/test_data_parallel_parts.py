"""Lab 03's parts: replicas, shards, buckets, batch norm, uneven batches."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DistributedSampler

from ranklab import device, launch
from ranklab.data_parallel import (
    OverlappedDataParallel, SyncBatchNorm, assign_buckets, convert_sync_batch_norm, join_uneven,
    plan, replicas_agree, shard_sampler,
)
from ranklab.engine import RankError
from ranklab.meter import Traffic

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]


def tied(seed=0, dtype=torch.float32):
    """Two tied layers, a frozen one, a batch norm with its buffers."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[3].requires_grad_(False)
    return model.to(device(), dtype)


# --- replicas -----------------------------------------------------------------------------------

def _agree_as_dtensors():
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    mesh, rank, seen = init_device_mesh(device().type, (2,)), dist.get_rank(), []
    local = torch.arange(6.0, device=device()).view(3, 2)
    for placement, change in ((Replicate(), 0), (Replicate(), rank), (Shard(0), 0)):
        model = nn.Linear(1, 1)
        model.weight = nn.Parameter(DTensor.from_local(local + change, mesh, [placement],
                                                       run_check=False))
        try:
            seen.append(replicas_agree(model))
        except ValueError as error:
            seen.append(str(error))
    return seen


def test_replicas_agree_on_copies_of_a_dtensor_and_refuses_its_shards():
    for seen in launch(_agree_as_dtensors, ranks=2):
        assert seen == [True, False, "replicas_agree: weight is (Shard(dim=0),), so no rank holds "
                        "a copy of it; compare its full_tensor()"]


# --- shards -------------------------------------------------------------------------------------

@pytest.mark.parametrize("drop_last", [False, True])
def test_shards_are_those_of_torchs_sampler(drop_last):
    for n in (1, 2, 3, 7, 8, 100, 1797):
        for ranks in (1, 2, 3, 4, 8):
            for rank in range(ranks):
                torch_ddp = DistributedSampler(range(n), ranks, rank, seed=5, drop_last=drop_last)
                for epoch in (0, 1, 7):
                    torch_ddp.set_epoch(epoch)
                    mine = shard_sampler(n, rank, ranks, epoch, 5, drop_last)
                    assert mine == list(torch_ddp) and len(mine) == len(torch_ddp)


# --- gradients and buckets ----------------------------------------------------------------------

def parameters(*sizes, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in sizes]


def _torchs_buckets(sizes, cap):
    # torch's own rule, on the list that backward gives: from the last to the first
    order = parameters(*sizes)[::-1]
    indices, _ = dist._compute_bucket_assignment_by_size(
        order, [cap], [False] * len(order), list(range(len(order))))
    return [[order[i].numel() for i in bucket] for bucket in indices]


def test_buckets_are_torchs():
    random = torch.Generator().manual_seed(0)
    for cap in (1, 40, 100, 1000):
        sizes = torch.randint(1, 60, (40,), generator=random).tolist()
        mine = [[p.numel() for p in b] for b in assign_buckets(parameters(*sizes), cap)]
        assert mine == _torchs_buckets(sizes, cap)


# --- batch norm ---------------------------------------------------------------------------------

def _converted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.ReLU(),
                          nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.Flatten()),
                          nn.BatchNorm1d(64, track_running_stats=False)).double().to(device())
    alone, names = copy.deepcopy(model), list(model.state_dict())
    assert convert_sync_batch_norm(model) is model and list(model.state_dict()) == names
    wrapped, R = OverlappedDataParallel(model), dist.get_world_size()
    largest = 0.0
    for step in range(3):
        x = torch.randn(12, 1, 6, 6, dtype=torch.float64,
                        generator=torch.Generator().manual_seed(step)).to(device())
        for net, rows in ((alone, x), (wrapped, x.chunk(R)[dist.get_rank()])):
            net.zero_grad()
            net(rows).square().mean().backward()
        for a, b in zip(model.parameters(), alone.parameters()):
            largest = max(largest, (a.grad - b.grad).abs().max().item())
    model.eval()
    return largest, (model(x) - alone.eval()(x)).abs().max().item()


def test_a_converted_model_trains_as_one_process_does():
    for gradients, evaluated in launch(_converted, ranks=3):
        assert gradients < 1e-12 and evaluated < 1e-12


def test_a_single_batch_norm_is_replaced():
    made = convert_sync_batch_norm(nn.BatchNorm1d(3).eval())
    assert isinstance(made, SyncBatchNorm) and not made.training
    assert convert_sync_batch_norm(made) is made


def _too_few(rows):
    norm = SyncBatchNorm(2).to(device())
    x = torch.ones(rows[dist.get_rank()], 2, device=device())
    try:
        norm(x)
        said = ""
    except ValueError as error:
        said = str(error)
    return said, torch.stack([norm.running_mean, norm.running_var]).isfinite().all().item()


@pytest.mark.parametrize("rows", [(1,), (1, 0, 0), (0, 0)])
def test_one_value_has_no_variance_and_every_rank_says_so(rows):
    sentence = f"n={sum(rows)} values in a channel of all ranks must be at least 2"
    assert launch(_too_few, rows, ranks=len(rows)) == [(sentence, True)] * len(rows)


def test_one_value_on_each_rank_is_enough():
    assert launch(_too_few, (1, 1, 0), ranks=3) == [("", True)] * 3


# --- uneven batches -----------------------------------------------------------------------------

def _batches(count):
    rank = dist.get_rank()
    random = torch.Generator().manual_seed(rank)
    return [torch.randn(3, 4, generator=random).to(device()) for _ in range(count)]


def _joined(counts_of_case, find_unused_parameters):
    differences, extra = [], []
    for counts in counts_of_case:
        mine = tied(seed=1)
        theirs = copy.deepcopy(mine)
        ours = OverlappedDataParallel(mine, 32, find_unused_parameters=find_unused_parameters)
        torch_ddp = TorchDDP(theirs, find_unused_parameters=find_unused_parameters)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (mine, theirs)]

        def step(model, optimizer, x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        batches = _batches(counts[dist.get_rank()])
        with Traffic() as traffic:
            for x in join_uneven(batches, ours):
                step(ours, optimizers[0], x)
        with Join([torch_ddp]):
            for x in batches:
                step(torch_ddp, optimizers[1], x)
        extra.append(sum(op.payload_bytes == 8 for op in traffic.ops if op.name == "all_reduce"))
        differences.append(max((a - b).abs().max().item() for a, b in zip(
            mine.state_dict().values(), theirs.state_dict().values())))
        assert replicas_agree(mine) and not ours.joining and ours.buffers_from == 0
    return max(differences), extra


@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_uneven_batches_end_as_with_torchs_join(find_unused_parameters):
    cases = (0, 3, 3, 1), (2, 1, 0, 0)
    for largest, extra in launch(_joined, cases, find_unused_parameters, ranks=4):
        assert largest < 1e-6
        assert extra == [max(counts) + 1 for counts in cases]


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
    try:
        for x in join_uneven(_batches(dist.get_rank()), model):
            model(x).sum().backward()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("kind", [SyncBatchNorm, nn.SyncBatchNorm])
def test_a_batch_norm_over_ranks_inside_is_refused_on_every_rank(kind):
    for said in launch(_batch_norm_inside, kind, ranks=3):
        assert said.startswith("a SyncBatchNorm inside join_uneven: it would wait")


# --- which buckets leave the least time exposed ---------------------------------------------------

def test_times_of_buckets_are_those_of_one_link():
    case = [1.0, 2.0, 3.0], [5, 5, 5], 0.5, 0.1
    assert plan.bucket_times([[0], [1, 2]], *case) == [(1.0, 2.0), (3.0, 4.5)]
    assert plan.exposed_seconds([[0], [1], [2]], *case) == 1.0
    assert plan.capped_buckets([5, 5, 5, 1], 10) == [[0, 1], [2, 3]]


def test_the_timeline_has_the_shapes_of_gpt2():
    ready, nbytes = plan.block_timeline()
    blocks = 12 * (12 * 768**2 + 13 * 768)  # weights; biases and norms
    assert sum(nbytes) == 4 * blocks and ready == sorted(ready) and len(ready) == 12 * 12
