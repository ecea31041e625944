"""Lab 03's parts: replicas, shards, buckets, batch norm, learning rate, uneven batches."""

import copy
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DistributedSampler

from ranklab import device, launch
from ranklab.checks.data_parallel import planning
from ranklab.data_parallel import (
    OverlappedDataParallel, SyncBatchNorm, assign_buckets, average_gradients, batch_norm_bytes,
    broadcast_parameters, convert_sync_batch_norm, join_uneven, plan, plan_buckets,
    replicas_agree, scale_learning_rate, shard_sampler, sync_batch_norm,
)
from ranklab.engine import RankError
from ranklab.meter import Traffic

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

RANKS = (1, 2, 3, 4)


def tied(seed=0, dtype=torch.float32):
    """Two tied layers, a frozen one, a batch norm with its buffers."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[3].requires_grad_(False)
    return model.to(device(), dtype)


# --- replicas -----------------------------------------------------------------------------------

def _broadcast(src):
    model = tied(seed=dist.get_rank())
    model[1].running_mean += dist.get_rank()
    with Traffic() as traffic:
        value = broadcast_parameters(model, src)
    right = tied(seed=src)
    right[1].running_mean += src
    equal = all(torch.equal(a, b) for a, b in zip(model.state_dict().values(),
                                                  right.state_dict().values()))
    still_tied = model[2].weight is model[0].weight and not model[3].weight.requires_grad
    return value is None and equal and still_tied, traffic.calls["broadcast"]


@pytest.mark.parametrize("R", RANKS)
def test_replicas_start_equal(R):
    tensors = 7 + 3  # tied once; three buffers
    assert launch(_broadcast, R - 1, ranks=R) == [(True, tensors)] * R


def _broadcast_in_a_group():
    group = dist.new_group([1, 2])
    model = tied(seed=dist.get_rank())
    if dist.get_rank():
        broadcast_parameters(model, 1, group)  # rank 1 of the group is rank 2
    return model[0].weight.cpu()


def test_src_counts_inside_the_group():
    zero, one, two = launch(_broadcast_in_a_group, ranks=3)
    assert torch.equal(one, two) and not torch.equal(zero, one)


def _swap(model):
    weight = model[2].weight.data
    weight[0, 0], weight[0, 1] = weight[0, 1].item(), weight[0, 0].item()


def _flip(bit):
    def flip(model):
        bits = model[3].bias.data.view(torch.int64 if bit > 31 else torch.int32)
        bits[1] ^= 1 << bit if bit not in (31, 63) else -(1 << bit)
    return flip


CHANGES = {"nothing": lambda model: None, "two elements swapped": _swap, "last bit": _flip(0),
           "sign": _flip(31), "buffer": lambda model: model[1].running_mean.add_(1)}


def _agree():
    seen, last = {}, dist.get_rank() == dist.get_world_size() - 1
    for name, change in {**CHANGES, "sign of a float64": _flip(63)}.items():
        model = tied(dtype=torch.float64 if "64" in name else torch.float32)
        if last:
            change(model)
        with Traffic() as traffic:
            value = replicas_agree(model)
        seen[name] = value, [op.payload_bytes for op in traffic.ops]
    other_types = nn.ParameterList([torch.tensor(float("nan")).bfloat16(), torch.zeros(0),
                                    torch.ones(2, 3).t(), torch.ones(2, dtype=torch.complex64)])
    return seen, replicas_agree(other_types)


@pytest.mark.parametrize("R", RANKS)
def test_replicas_agree_sees_one_bit(R):
    for seen, other_types in launch(_agree, ranks=R):
        assert other_types is True
        for name, (value, sent) in seen.items():
            assert value is (R == 1 or name in ("nothing", "buffer")), name
            assert sent == [16]


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
                torchs = DistributedSampler(range(n), ranks, rank, seed=5, drop_last=drop_last)
                for epoch in (0, 1, 7):
                    torchs.set_epoch(epoch)
                    mine = shard_sampler(n, rank, ranks, epoch, 5, drop_last)
                    assert mine == list(torchs) and len(mine) == len(torchs)


@pytest.mark.parametrize("arguments, sentence", [
    ((10, 4, 4), "rank=4 must be between 0 and ranks - 1 = 3"),
    ((10, -1, 4), "rank=-1 must be between"),
    ((0, 0, 1), "n=0 samples must be at least 1"),
])
def test_shards_of_bad_input(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        shard_sampler(*arguments)


# --- gradients and buckets ----------------------------------------------------------------------

def _average():
    rank, model = dist.get_rank(), tied()
    for number, p in enumerate(model.parameters()):
        if p.requires_grad and (rank or number):  # rank 0 lacks the first
            p.grad = torch.full_like(p, float(rank))
    with Traffic() as traffic:
        average_gradients(model)
    return [None if p.grad is None else p.grad.unique().tolist() for p in model.parameters()], \
        traffic.calls["all_reduce"]


@pytest.mark.parametrize("R", RANKS)
def test_gradients_are_averaged_one_by_one(R):
    mean = sum(range(R)) / R
    for averages, messages in launch(_average, ranks=R):
        assert averages == [[mean]] * 5 + [None] * 2 and messages == 5


def parameters(*sizes, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in sizes]


@pytest.mark.parametrize("sizes, cap, buckets", [
    ((5, 3, 2, 1), 16, [[1, 2, 3], [5]]),  # 6 floats: closed by what brings it over the cap
    ((5, 3, 2, 1), 12, [[1, 2], [3], [5]]),  # just reached
    ((5, 3, 2, 1), 13, [[1, 2, 3], [5]]),
    ((1, 100, 1), 40, [[1, 100], [1]]),
    ((4, 4), 10**9, [[4, 4]]),
    ((4, 4), 1, [[4], [4]]),
    ((), 1, []),
])
def test_buckets_close_when_they_reach_the_cap(sizes, cap, buckets):
    got = assign_buckets(parameters(*sizes), cap)
    assert [[p.numel() for p in bucket] for bucket in got] == buckets


def test_a_bucket_has_one_type():
    a, b, c, d = parameters(1, 2, 3, 4)
    b.data, d.data = b.data.double(), d.data.double()
    got = assign_buckets(iter([a, b, c, d]), 20)  # d closes at once; c, b and a are left
    assert [[p.numel() for p in bucket] for bucket in got] == [[4], [3, 1], [2]]


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


def test_a_bucket_without_room_is_refused():
    with pytest.raises(ValueError, match="cap_bytes=0 must be at least 1"):
        assign_buckets(parameters(1), 0)


# --- batch norm ---------------------------------------------------------------------------------

SHAPES = ((7, 3), (7, 3, 5), (7, 3, 4, 2))
CUTS = {1: (7,), 2: (2, 5), 3: (4, 0, 3), 4: (1, 3, 0, 3)}  # rows of each rank; some have none


def _whole(shape, dtype=torch.float64, mean=0.0):
    random = torch.Generator().manual_seed(len(shape))
    x, upstream = torch.randn(2, *shape, generator=random, dtype=torch.float64)
    weight, bias = torch.rand(2, 3, generator=random, dtype=torch.float64)
    return [t.to(device(), dtype) for t in (x + mean, upstream, weight, bias)]


def _batch_norm(shape, cut, dtype, mean):
    x, upstream, weight, bias = _whole(shape, dtype, mean)
    rows, largest = slice(sum(cut[:dist.get_rank()]), sum(cut[:dist.get_rank() + 1])), 0.0
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[len(shape) - 2]
    oracle, mine = kind(3).to(x), SyncBatchNorm(3).to(x)
    for module in (oracle, mine):
        module.weight.data.copy_(weight)
        module.bias.data.copy_(bias)
    whole, part = (t.clone().requires_grad_() for t in (x, x[rows]))
    right = oracle(whole)
    right.backward(upstream)
    with Traffic() as traffic:
        y = mine(part)
        y.backward(upstream[rows])
    for p in mine.parameters():
        dist.all_reduce(p.grad)  # each rank has its own part of the sum
    pairs = [(y, right[rows]), (part.grad, whole.grad[rows])]
    pairs += [(a.grad, b.grad) for a, b in zip(mine.parameters(), oracle.parameters())]
    pairs += list(zip(mine.buffers(), oracle.buffers()))
    for got, wanted in pairs:
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        if got.numel():
            largest = max(largest, (got - wanted).abs().max().item())
    return largest, [op.payload_bytes for op in traffic.ops]


@pytest.mark.parametrize("R", RANKS)
def test_batch_norm_over_ranks_is_that_of_the_whole_batch(R):
    def all_shapes():
        return [_batch_norm(shape, CUTS[R], torch.float64, 0.0) for shape in SHAPES]

    for of_rank in launch(all_shapes, ranks=R):
        for largest, sent in of_rank:
            assert largest < 1e-12
            assert sent == [batch_norm_bytes(3), 16 * 3]  # one message forward, one backward


def test_batch_norm_keeps_its_digits_far_from_zero():
    """Mean 3000, standard deviation 1: mean(x^2) - mean(x)^2 in float32 has no digit left."""
    (largest, _), _ = launch(_batch_norm, (7, 3), (3, 4), torch.float32, 3000.0, ranks=2)
    assert largest < 5e-3  # of float32's own rounding of x: 3000 * 6e-8 * 7


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


@pytest.mark.parametrize("R", [1, 3])
def test_a_converted_model_trains_as_one_process_does(R):
    for gradients, evaluated in launch(_converted, ranks=R):
        assert gradients < 1e-12 and evaluated < 1e-12


def test_a_single_batch_norm_is_replaced():
    made = convert_sync_batch_norm(nn.BatchNorm1d(3).eval())
    assert isinstance(made, SyncBatchNorm) and not made.training
    assert convert_sync_batch_norm(made) is made


@pytest.mark.parametrize("x, channels", [((4,), 4), ((2, 3), 4)])
def test_batch_norm_of_bad_shapes(x, channels):
    with pytest.raises(ValueError, match=r"\(B, C, ...\), and weight and bias \(C,\), not \(4,\)"):
        sync_batch_norm(torch.zeros(x), torch.ones(channels), torch.zeros(channels))


def _too_few(rows):
    norm = SyncBatchNorm(2).to(device())
    x = torch.ones(rows[dist.get_rank()], 2, device=device())
    try:
        norm(x)
        said = ""
    except ValueError as error:
        said = str(error)
    return said, torch.stack([norm.running_mean, norm.running_var]).isfinite().all().item()


@pytest.mark.parametrize("rows", [(1,), (0, 1), (1, 0, 0), (0, 0)])
def test_one_value_has_no_variance_and_every_rank_says_so(rows):
    sentence = f"n={sum(rows)} values in a channel of all ranks must be at least 2"
    assert launch(_too_few, rows, ranks=len(rows)) == [(sentence, True)] * len(rows)


def test_one_value_on_each_rank_is_enough():
    assert launch(_too_few, (1, 1, 0), ranks=3) == [("", True)] * 3


# --- learning rate ------------------------------------------------------------------------------

def test_learning_rates():
    assert scale_learning_rate(0.1, 8192, 256) == pytest.approx(3.2)  # Goyal et al. 2017
    assert scale_learning_rate(0.1, 1024, 256, rule="sqrt") == pytest.approx(0.2)
    assert scale_learning_rate(0.1, 64, 256) == pytest.approx(0.025)
    warm = [scale_learning_rate(0.1, 1024, 256, step, warmup=3) for step in range(5)]
    assert warm == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert scale_learning_rate(0.1, 512, 256, step=0) == pytest.approx(0.2)  # no warm-up


@pytest.mark.parametrize("bad, sentence", [
    ({"rule": "cubic"}, "rule='cubic' must be one of linear, sqrt"),
    ({"batch": 0}, "batch=0 and base_batch=256 must be at least 1"),
    ({"base_batch": 0}, "base_batch=0 must be at least 1"),
    ({"warmup": -1}, "warmup=-1 at least 0"),
])
def test_learning_rates_of_bad_input(bad, sentence):
    with pytest.raises(ValueError, match=sentence):
        scale_learning_rate(**{"lr": 0.1, "batch": 512, "base_batch": 256, **bad})


# --- uneven batches -----------------------------------------------------------------------------

def _batches(count):
    rank = dist.get_rank()
    random = torch.Generator().manual_seed(rank)
    return [torch.randn(3, 4, generator=random).to(device()) for _ in range(count)]


def _joined(counts_of_case, find_unused):
    differences, extra = [], []
    for counts in counts_of_case:
        mine = tied(seed=1)
        theirs = copy.deepcopy(mine)
        ours = OverlappedDataParallel(mine, 32, find_unused=find_unused)
        torchs = TorchDDP(theirs, find_unused_parameters=find_unused)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (mine, theirs)]

        def step(model, optimizer, x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        batches = _batches(counts[dist.get_rank()])
        with Traffic() as traffic:
            for x in join_uneven(batches, ours):
                step(ours, optimizers[0], x)
        with Join([torchs]):
            for x in batches:
                step(torchs, optimizers[1], x)
        extra.append(sum(op.payload_bytes == 8 for op in traffic.ops if op.name == "all_reduce"))
        differences.append(max((a - b).abs().max().item() for a, b in zip(
            mine.state_dict().values(), theirs.state_dict().values())))
        assert replicas_agree(mine) and not ours.joining and ours.buffers_from == 0
    return max(differences), extra


CASES = {1: [(0,), (2,)], 2: [(0, 2), (3, 1), (2, 2)], 3: [(1, 3, 0), (2, 0, 1)],
         4: [(0, 3, 3, 1), (2, 1, 0, 0)]}


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("R", RANKS)
def test_uneven_batches_end_as_with_torchs_join(R, find_unused):
    for largest, extra in launch(_joined, CASES[R], find_unused, ranks=R):
        assert largest < 1e-6
        assert extra == [max(counts) + 1 for counts in CASES[R]]


def _left_early():
    model = OverlappedDataParallel(tied())
    for x in join_uneven(_batches(3), model):
        model(x).sum().backward()
        break
    return model.joining, model.buffers_from


def test_a_loop_left_early_leaves_no_trace():
    assert launch(_left_early, ranks=2) == [(False, 0)] * 2


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

def test_no_plan_of_buckets_is_better_than_ours():
    dice = random.Random(2)
    for number in range(120):
        case = planning._timeline(dice, number)
        best, ours = planning._least_by_all_plans(*case), plan_buckets(*case)
        assert sum(ours, []) == list(range(len(case[0])))
        assert plan.exposed_seconds(ours, *case) == pytest.approx(best)
        assert planning._least(*case) == pytest.approx(best)  # the check's, for many gradients
        assert plan.least_exposed(*case) <= best + 1e-9
    assert plan_buckets([], [], 1.0, 1.0) == []


def test_times_of_buckets_are_those_of_one_link():
    case = [1.0, 2.0, 3.0], [5, 5, 5], 0.5, 0.1
    assert plan.bucket_times([[0], [1, 2]], *case) == [(1.0, 2.0), (3.0, 4.5)]
    assert plan.exposed_seconds([[0], [1], [2]], *case) == 1.0
    assert plan.capped_buckets([5, 5, 5, 1], 10) == [[0, 1], [2, 3]]


def test_the_timeline_has_the_shapes_of_gpt2():
    ready, nbytes = plan.block_timeline()
    blocks = 12 * (12 * 768**2 + 13 * 768)  # weights; biases and norms
    assert sum(nbytes) == 4 * blocks and ready == sorted(ready) and len(ready) == 12 * 12
