"""Traffic counts what torch's own parallelism sends, like CommDebugMode, and in bytes too."""

from collections import Counter

import torch
import torch.distributed as dist

from ranklab import device, launch
from ranklab.meter import Traffic

NAMES = {  # of torch's ops -> ours
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
    "allgather_": "all_gather",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_scatter_tensor": "reduce_scatter",
}


def counted(work, *args):
    with Traffic() as traffic:
        work(*args)
    return traffic


def kinds(comm_counts):
    """CommDebugMode's counts under our names."""
    total = Counter()
    for packet, count in comm_counts.items():
        name = packet.__name__.split(".")[-1]
        total[NAMES.get(name, name)] += count
    return +total


def beside_comm_debug_mode(work):
    """Our count and torch's of the same code. Ours is inside, so it meets each DTensor first."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as comm, Traffic() as traffic:
        work()
    return traffic, kinds(comm.get_comm_counts())


def small_model(seed=0):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)]
    return torch.nn.Sequential(*layers).to(device())


def torch_peers():
    """DDP, FSDP2, tensor parallel, functional collectives, on 4 ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, parallelize_module)
    from torch.nn.parallel import DistributedDataParallel

    x = torch.ones(4, 8, device=device())
    mesh = dist.init_device_mesh(device().type, (4,))
    ddp, fsdp, tp = small_model(), small_model(), small_model()
    for layer in (fsdp[0], fsdp[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(fsdp, mesh=mesh)
    parallelize_module(tp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ddp = DistributedDataParallel(ddp)
    ddp(x).sum().backward()
    ddp(x).sum().backward()  # the first two steps have extras, tested below
    models = {"ddp": ddp, "fsdp": fsdp, "tp": tp}
    seen = {name: beside_comm_debug_mode(lambda m=model: m(x).sum().backward())
            for name, model in models.items()}
    for name, call in (functional_peers(x) | dtensor_peers(mesh)).items():
        seen[name] = beside_comm_debug_mode(call)
    return seen


def functional_peers(x):
    import torch.distributed._functional_collectives as fc
    import torch.distributed.nn.functional as with_grad

    world, leaf = dist.group.WORLD, x.clone().requires_grad_()
    return {
        "gather and back": lambda: fc.all_gather_single_autograd(leaf, 0, world).sum().backward(),
        "result of one into another": lambda: dist.all_reduce(fc.all_reduce(x, "sum", world)),
        "nn.functional": lambda: with_grad.all_reduce(leaf).sum().backward(),
    }


def dtensor_peers(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rows = distribute_tensor(torch.ones(7, 12, device=device()), mesh, [Shard(0)])
    columns = distribute_tensor(torch.ones(8, 12, device=device()), mesh, [Shard(1)])
    return {
        "dtensor matmul": lambda: (columns @ columns.T).full_tensor(),
        "dtensor gather, uneven": lambda: rows.redistribute(mesh, [Replicate()]).to_local() + 1,
        "dtensor sum": lambda: rows.sum().full_tensor(),
        "dtensor op talks by itself": lambda: columns.softmax(dim=1),
    }


def test_torch_itself_is_counted_like_comm_debug_mode_does():
    ours = [8 * 16 * 4 + 16 * 4, 16 * 8 * 4 + 8 * 4]  # bytes of each layer
    for seen in launch(torch_peers, ranks=4):
        for name, (traffic, theirs) in seen.items():
            assert traffic.calls == theirs, name
        assert seen["ddp"][0].calls == {"all_reduce": 1}
        assert seen["ddp"][0].ops[0].payload_bytes == sum(ours)
        fsdp = seen["fsdp"][0]
        assert fsdp.calls == {"all_gather": 4, "reduce_scatter": 2}
        assert fsdp.sent_bytes * 4 == 3 * 3 * sum(ours)  # ZeRO-3: gather, gather, reduce-scatter
        assert seen["tp"][0].calls == {"all_reduce": 1}
        assert seen["tp"][0].ops[0].payload_bytes == 4 * 8 * 4  # the output of the second layer
        uneven = seen["dtensor gather, uneven"][0]  # 7 rows in shards of 2, 2, 2, 1, padded to 2
        assert uneven.calls == {"all_gather": 1} and uneven.sent_bytes == 3 * 2 * 12 * 4
        assert seen["dtensor op talks by itself"][0].calls == {"all_gather": 1}
        assert seen["dtensor matmul"][0].calls == seen["dtensor sum"][0].calls == {"all_reduce": 1}
        functional = seen["gather and back"][0]
        assert functional.calls == {"all_gather": 1, "reduce_scatter": 1}
        assert seen["result of one into another"][0].calls == {"all_reduce": 2}
        assert seen["nn.functional"][0].calls == {"all_reduce": 2}


def two_dimensions():
    from torch.distributed.fsdp import fully_shard

    model = small_model()
    mesh = dist.init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    traffic = counted(lambda: model(torch.ones(4, 8, device=device())).sum().backward())
    return traffic, {axis: tuple(dist.get_process_group_ranks(mesh[axis].get_group()))
                     for axis in mesh.mesh_dim_names}


def test_bytes_are_known_per_axis_of_a_mesh():
    weights = sum(p.nbytes for p in small_model().parameters())
    for traffic, groups in launch(two_dimensions, ranks=4):
        assert traffic.bytes_in[groups["shard"]] == 2 * weights // 2  # gather, reduce-scatter
        assert traffic.bytes_in[groups["replicate"]] == weights // 2  # all-reduce of the shard
        assert traffic.calls == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}


def ddp_step_by_step():
    from torch.nn.parallel import DistributedDataParallel

    x, made = torch.ones(4, 8, device=device()), []
    construct = counted(lambda: made.append(DistributedDataParallel(small_model())))
    return construct, [counted(lambda: made[0](x).sum().backward()) for _ in range(3)]


def test_ddp_sends_more_than_gradients_at_the_start():
    """The constructor spreads rank 0's weights; the second step, the new order of its buckets."""
    weights = sum(p.nbytes for p in small_model().parameters())
    for rank, (construct, steps) in enumerate(launch(ddp_step_by_step, ranks=2)):
        spread = construct.ops[-1]  # before it, DDP compares the ranks' shapes
        assert construct.calls == {"all_gather": 1, "broadcast": 2}
        assert (spread.name, spread.payload_bytes) == ("broadcast", weights)
        assert spread.sent_bytes == (weights if rank == 0 else 0)
        assert [step.calls["all_reduce"] for step in steps] == [1, 1, 1]
        assert [step.calls["broadcast"] for step in steps] == [0, 2, 0]


def pipeline_step():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, half = dist.get_rank(), small_model()
    stage = PipelineStage(half, rank, 2, device())
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.MSELoss())
    x = torch.ones(8, 8, device=device())

    def step():
        schedule.step(x) if rank == 0 else schedule.step(target=x)

    step()  # the first step also exchanges shapes
    return counted(step)


def test_pipelining_sends_an_activation_down_and_a_gradient_up_per_micro_batch():
    first, last = launch(pipeline_step, ranks=2)
    micro_batch = 2 * 8 * 4
    assert first.calls == last.calls == {"send": 4, "recv": 4}
    assert first.bytes_to == {1: 4 * micro_batch} and last.bytes_to == {0: 4 * micro_batch}
    assert first.received_bytes == 4 * micro_batch


def compiled_function():
    import torch.distributed._functional_collectives as fc

    uncompiled = []

    def work(x):
        if not torch.compiler.is_compiling():
            uncompiled.append(x)
        return fc.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    x = torch.ones(6, device=device())
    fast = torch.compile(work, backend="aot_eager")
    first, second = counted(fast, x), counted(fast, x)
    fast(x)
    return dict(first.calls), dict(second.calls), len(uncompiled)


def test_compiled_functions_are_counted_and_stay_compiled():
    for first, second, uncompiled in launch(compiled_function, ranks=2):
        assert first == second == {"all_reduce": 1}
        assert uncompiled == 0


def test_a_dry_run_on_fake_tensors_is_counted():
    """One process poses as rank 0 of 128 with a gradient of 40 GB."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    dist.init_process_group("fake", rank=0, world_size=128)
    try:
        with Traffic() as outside, FakeTensorMode(), Traffic() as inside:
            dist.all_reduce(torch.empty(10 * 10**9))
    finally:
        dist.destroy_process_group()
    assert outside.sent_bytes == inside.sent_bytes == 2 * 127 * 40 * 10**9 // 128
