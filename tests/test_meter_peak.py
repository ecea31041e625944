"""MemoryCurve: live bytes and their peak, exact; what is gathered, resized, or there twice."""

import dataclasses
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ranklab import device, launch
from ranklab.data_parallel import OverlappedDataParallel
from ranklab.meter import MemoryCurve, MemoryPeak, SavedActivations, Traffic, memory_of
from ranklab.mesh import build_mesh

LAYER = 8 * 8 + 8  # elements of Linear(8, 8)


def totals(curve):
    return [memory.total for memory in curve.points]


def bytes_of(model):
    return sum(p.nbytes for p in model.parameters())


def most(curve, category):
    return max(getattr(memory, category) for memory in curve.points)


# --- one process ----------------------------------------------------------------------------------


def test_storages_count_from_the_op_that_makes_them_to_the_end_of_their_life():
    model = torch.nn.Linear(8, 8)
    own = LAYER * 4
    with MemoryCurve(model) as curve:
        a = torch.empty(100)
        b = torch.empty(50)
        part = a[:10]  # a view, which keeps all of `a` alive
        del a
        c = torch.empty(25)
        del part
        b += 1
        del b, c
    assert totals(curve) == [own + n for n in (0, 400, 600, 600, 700, 300, 0)]
    assert curve.peak_bytes == own + 700
    assert (curve.peak.parameters, curve.peak.activations) == (own, 700)


def test_a_storage_that_is_resized_counts_with_its_size_of_the_moment():
    with MemoryCurve(torch.nn.Identity()) as curve:
        whole = torch.empty(100)
        whole.untyped_storage().resize_(0)  # as FSDP frees what it gathered
        small = torch.empty(1)
        whole.untyped_storage().resize_(800)
        small.add_(1)
        whole.untyped_storage().resize_(0)
    assert totals(curve) == [0, 400, 4, 804, 4]


def test_what_is_older_than_the_block_counts_from_its_first_use():
    batch, unused = torch.ones(10), torch.ones(1000)
    with MemoryCurve(torch.nn.Identity()) as curve:
        batch.sum()
    assert totals(curve) == [0, 44, 40] and unused.numel() == 1000


def test_the_categories_of_a_step_and_its_marks():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    adam = torch.optim.AdamW(model.parameters(), foreach=False)
    own, x = 2 * LAYER * 4, torch.ones(3, 8)
    with MemoryCurve(model, adam) as curve:
        model(x).sum().backward()
        curve.mark("step")
        adam.step()
        curve.mark("zero_grad")
        adam.zero_grad()
    step, zero_grad = (index for index, _ in curve.marks)
    assert curve.points[step].gradients == own == most(curve, "gradients")
    assert max(memory.optimizer_state for memory in curve.points[:step + 1]) == 0
    assert curve.points[zero_grad].optimizer_state == 2 * own + 4 * 4
    last, now = curve.points[-1], memory_of(model, adam)
    assert last.activations == x.nbytes and last.gradients == 0
    assert last.total - last.activations == now.total
    same = pickle.loads(pickle.dumps(curve))
    assert same.peak == curve.peak and same.marks == curve.marks


def peak_of_activations(apply):
    """(most bytes of activations in a step, gradients) of 4 blocks whose inner width is large."""
    torch.manual_seed(0)
    make = torch.nn.Sequential
    blocks = make(*[make(torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Linear(256, 16))
                    for _ in range(4)])
    with MemoryCurve(blocks) as curve:
        h = torch.ones(32, 16, requires_grad=True)
        for block in blocks:
            h = apply(block, h)
        h.sum().backward()
    return most(curve, "activations"), [p.grad for p in blocks.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_step_peaks_lower_by_what_it_does_not_keep(reentrant):
    full, gradients = peak_of_activations(lambda block, h: block(h))
    kept, same = peak_of_activations(lambda block, h: checkpoint(block, h, use_reentrant=reentrant))
    inner = 32 * 256 * 4  # the ReLU's output: the next Linear saves the same storage
    assert all(torch.equal(a, b) for a, b in zip(gradients, same))
    assert 2.5 * inner < full - kept < 3.5 * inner  # of four blocks one is there at a time


def test_saved_activations_release_what_they_counted():
    x = torch.ones(10, requires_grad=True)
    with SavedActivations() as saved:
        y = x.exp()
        y.untyped_storage().resize_(0)
        assert saved.live_bytes == 40
        del y
    assert (saved.live_bytes, saved.peak_bytes) == (0, 40)
    assert saved.bytes == 40


# --- what code holds for a while ------------------------------------------------------------------


def test_memory_of_counts_what_it_is_given_each_storage_once():
    model = torch.nn.Linear(8, 8)
    model(torch.ones(2, 8)).sum().backward()
    own, bucket = LAYER * 4, torch.zeros(LAYER)
    twice = memory_of(model, communication=[bucket])
    assert (twice.gradients, twice.communication_buffers) == (own, own)
    assert "communication buffers    288" in str(twice)
    views = bucket.split([p.numel() for p in model.parameters()])
    for p, view in zip(model.parameters(), views):
        p.grad = view.view_as(p)
    once = memory_of(model, communication={"bucket": bucket})
    assert (once.gradients, once.communication_buffers) == (own, 0)
    whole = torch.zeros(4 * LAYER)
    assert memory_of(model, gathered=(t for t in [whole])).gathered_parameters == whole.nbytes
    whole.untyped_storage().resize_(0)
    assert memory_of(model, gathered=[whole]).gathered_parameters == 0


def test_a_list_that_changes_is_read_at_every_op():
    gathered, sent = [], []
    with MemoryCurve(torch.nn.Identity(), gathered=gathered, communication=lambda: sent) as curve:
        gathered.append(torch.empty(10))
        torch.empty(0)
        sent.append(torch.empty(5))
        torch.empty(0)
        gathered.clear()
    seen = [(m.gathered_parameters, m.communication_buffers, m.activations) for m in curve.points]
    assert seen == [(0, 0, 0), (0, 0, 40), (40, 0, 0), (40, 0, 20), (40, 20, 0), (0, 20, 0)]


# --- ranks ----------------------------------------------------------------------------------------


def small_model(layers=3):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(layers)]).to(device())


def replica_curves():
    model = OverlappedDataParallel(small_model())
    curves, flats = [], [bucket.flat for bucket in model.buckets]
    for _ in range(2):
        with MemoryCurve(model, communication=flats) as curve:
            model(torch.ones(2, 8, device=device())).sum().backward()
        curves.append(curve)
    model.zero_grad()
    return *curves, memory_of(model, communication=flats)


def test_gradients_that_are_views_of_a_bucket_count_once():
    own = 3 * LAYER * 4
    for first, second, cleared in launch(replica_curves, ranks=2):
        assert first.points[0].communication_buffers == own and first.points[0].gradients == 0
        # The one bucket is filled when all gradients are there: until then, there are two of each.
        assert max(m.gradients + m.communication_buffers for m in first.points) == 2 * own
        for memory in (first.points[-1], *second.points):
            assert (memory.gradients, memory.communication_buffers) == (own, 0)
        assert (cleared.gradients, cleared.communication_buffers) == (0, own)


def ddp_curve(as_view):
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(small_model(), gradient_as_bucket_view=as_view)
    for _ in range(3):
        with MemoryCurve(model) as curve:
            model(torch.ones(2, 8, device=device())).sum().backward()
    return curve.points[-1].gradients, curve.points[-1].activations


def test_torch_ddp_holds_gradients_twice_unless_they_are_views():
    own = 3 * LAYER * 4
    for as_view, extra in ((False, own), (True, 0)):
        for gradients, rest in launch(ddp_curve, as_view, ranks=2):
            assert gradients == own and extra <= rest < extra + own // 2


def fsdp_curve(reshard):
    from torch.distributed.fsdp import fully_shard

    model = small_model()
    mesh = dist.init_device_mesh(device().type, (4,))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    def gathered():
        for layer in model:
            for param in layer._get_fsdp_state()._fsdp_param_group.fsdp_params:
                yield from getattr(param, "all_gather_outputs", [])

    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        with MemoryCurve(model, optimizer, gathered) as curve:
            model(torch.ones(1, 8, device=device())).sum().backward()
        optimizer.zero_grad()
    return curve


@pytest.mark.parametrize("reshard, layers", [(True, 1), (False, 3)])
def test_fsdp_gathers_a_layer_at_a_time_and_frees_it(reshard, layers):
    own, shards = LAYER * 4, 3 * LAYER
    for curve in launch(fsdp_curve, reshard, ranks=4):
        assert most(curve, "gathered_parameters") == layers * own
        assert curve.points[0].gathered_parameters == curve.points[-1].gathered_parameters == 0
        assert {memory.parameters for memory in curve.points} == {shards}
        assert {memory.optimizer_state for memory in curve.points} == {0}
        assert curve.points[-1].gradients == shards
        assert curve.peak_bytes > shards + layers * own


def axes_traffic():
    mesh, x = build_mesh({"data": 2, "tensor": 2}), torch.ones(100, device=device())
    with Traffic() as traffic:
        dist.all_reduce(x[:10], group=mesh.group("tensor"))
        dist.all_reduce(x, group=mesh.group("data"))
        dist.all_reduce(x[:4])
        dist.all_reduce(x[:4], group=dist.new_group([0, 1, 2]))
    return traffic, mesh


def test_bytes_are_counted_for_each_axis_of_a_mesh():
    for rank, (traffic, mesh) in enumerate(launch(axes_traffic, ranks=4)):
        other = {} if rank == 3 else {"other": traffic.ops[3].sent_bytes}
        assert traffic.by_axis(mesh) == {"tensor": 40, "data": 400, "data x tensor": 24} | other


# --- MemoryPeak -----------------------------------------------------------------------------------

def _step_of(model, optimizer, curve):
    """A step with temporaries, and a storage that is resized, as FSDP does."""
    whole = torch.empty(3000)
    with curve:
        for size in (0, 12_000, 0, 24_000):
            whole.untyped_storage().resize_(size)
            whole[: size // 4].fill_(1)
            x = torch.randn(40, 8)
            checkpoint(model, x, use_reentrant=False).exp().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return curve.peak


def test_the_peak_of_few_points_is_that_of_all():
    def found(kind, **options):
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(9)))
        optimizer = torch.optim.AdamW(model.parameters())
        curve = kind(model, optimizer, **options)
        return _step_of(model, optimizer, curve), len(curve.points), curve

    def gradients_and_state(memory):
        return dataclasses.replace(memory, parameters=0, activations=0)

    peak, all_points, curve = found(MemoryCurve)
    its_peak, points, _ = found(MemoryPeak)
    assert its_peak == peak and points < all_points / 4
    part, _, _ = found(MemoryPeak, of=gradients_and_state)
    assert part.total == max(gradients_and_state(point).total for point in curve.points)
