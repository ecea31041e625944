"""ranklab.horovod: every verb, what goes wrong, how it begins and ends: no rank waits for ever."""

import re

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranklab.horovod as hvd
from ranklab import launch
from ranklab.horovod.trace import read_timeline
from ranklab.horovod.world import Config

pytestmark = pytest.mark.usefixtures("one_thread")
ONES, FP16 = torch.ones(3), hvd.Compression.fp16


def hvd_ranks(fn, *args, ranks=2, nodes=1, **config):
    """`fn(*args)` on ranks between init() and shutdown()."""

    def run():
        hvd.init(**{"stall_check": 10, "stall_shutdown": 20} | config)
        value = fn(*args)
        hvd.barrier()
        hvd.shutdown()
        return value

    return launch(run, ranks=ranks, nodes=nodes, timeout=40)


def mine(rank, n=7):
    return ((torch.arange(n) * 3 + rank * 5) % 11 - 4).float()


def test_every_verb_is_right():
    def every_verb():
        rank, R, x = hvd.rank(), hvd.size(), mine(hvd.rank())
        xs, sixes = (torch.stack([mine(r, n) for r in range(R)]) for n in (7, 6))
        strided, there = (sixes[rank].clone().view(2, 3).t() for _ in range(2))
        mean = sixes.mean(0).view(2, 3).t()
        for got, right in (
            (hvd.allreduce(x, op=hvd.Sum), xs.sum(0)), (hvd.allreduce(x), xs.mean(0)),
            (hvd.allreduce(x, op=hvd.Min), xs.amin(0)),
            (hvd.allreduce(x, op=hvd.Product), xs.prod(0)),
            (hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5), xs.sum(0)),
            (hvd.allreduce(x.long()), xs.mean(0).trunc().long()),
            (hvd.allreduce(strided), mean), (hvd.allreduce_(strided), mean), (strided, mean),
            (hvd.allgather(torch.full((rank, 2), rank)), torch.cat([torch.full((r, 2), r)
                                                                    for r in range(R)])),
            (hvd.allgather(torch.empty(0, 3)), torch.empty(0, 3)),
            (hvd.broadcast(x, R - 1), xs[-1]), (x, xs[rank]),
            (hvd.broadcast_(there, 0), sixes[0].view(2, 3).t()),
            (hvd.grouped_allreduce([x, x[:3], x.double()]),
             [xs.mean(0), xs.mean(0)[:3], xs.mean(0).double()]),
            (hvd.broadcast_object({"rank": rank} if rank == R - 1 else None, R - 1)["rank"], R - 1),
            ([hvd.allreduce(torch.ones(n), name="x") for n in (1, 1, 2)],
             [torch.ones(n) for n in (1, 1, 2)]),
            ([hvd.local_rank(), hvd.local_size(), hvd.cross_size()], [rank % 2, 2, 2]),
        ):
            torch.testing.assert_close(got, right)

    hvd_ranks(every_verb, ranks=4, nodes=2)


def test_gradients_flow_back_through_allreduce_by_the_same_all_reduce():
    def flows():
        x = torch.ones(2, requires_grad=True)
        for options in ({}, {"op": hvd.Sum}, {"compression": FP16}):
            (hvd.allreduce(x, None, "x", **options) * (1.0 + hvd.rank())).sum().backward()
        return x.grad.tolist()

    assert hvd_ranks(flows, ranks=3) == [[2.0 + 6.0 + 2.0] * 2] * 3


DIFFERENTIABLE = {  # what a rank calls: the same in one process, of which loss of all ranks
    "grouped_allreduce": (lambda x: torch.cat(hvd.grouped_allreduce([x.sum(0), x[0]], op=hvd.Sum)),
                          lambda xs: torch.cat([sum(x.sum(0) for x in xs), sum(x[0] for x in xs)]),
                          sum),
    "allgather": (hvd.allgather, torch.cat, lambda losses: sum(losses) / 3),
    "grouped_allgather": (lambda x: torch.cat(hvd.grouped_allgather([x, x * x])),
                          lambda xs: torch.cat([*xs, *(x * x for x in xs)]),
                          lambda losses: sum(losses) / 3),
    "broadcast": (lambda x: hvd.broadcast(x[0], 1), lambda xs: xs[1][0],
                  lambda losses: sum(losses) / 3),
}


def test_gradients_are_those_of_one_process():
    def loss(y, rank):
        return ((y + rank + 1).square() * torch.arange(1.0, y.numel() + 1).view(y.shape)).sum()

    def inputs():  # rank r has r + 1 rows
        return [mine(r, 2 * (r + 1)).view(-1, 2).requires_grad_() for r in range(3)]

    def gradients():
        xs = [inputs()[hvd.rank()] for _ in DIFFERENTIABLE]
        for x, (call, _, _) in zip(xs, DIFFERENTIABLE.values()):
            loss(call(x), hvd.rank()).backward()
        return [x.grad for x in xs]

    by_rank = hvd_ranks(gradients, ranks=3)
    for i, (name, (_, alone, total)) in enumerate(DIFFERENTIABLE.items()):
        xs = inputs()
        total([loss(alone(xs), rank) for rank in range(3)]).backward()
        for rank, x in enumerate(xs):
            right = torch.zeros_like(x) if x.grad is None else x.grad  # broadcast, not the root
            torch.testing.assert_close(by_rank[rank][i], right, msg=lambda m: f"{name}: {m}")


def test_any_type_is_gathered_and_broadcast_and_inference_mode_is_no_trap():
    types = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int64,
             torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64)

    def travels():
        rank, R = hvd.rank(), hvd.size()
        for dtype in types:
            x = (torch.arange(4) % 2 * (rank + 1)).to(dtype)
            whole = torch.cat([torch.arange(4) % 2 * (r + 1) for r in range(R)]).to(dtype)
            torch.testing.assert_close(hvd.allgather(x).float(), whole.float())
            last = hvd.broadcast(x.view(2, 2).t(), R - 1)
            assert last.dtype == dtype
            assert last.t().flatten().tolist() == whole[-4:].tolist()
        one, other = hvd.allgather_async(x), hvd.broadcast_async(x, 1)
        assert hvd.synchronize(one).tolist() == whole.tolist()
        assert hvd.synchronize(other).tolist() == whole[4:8].tolist()
        pair = [torch.ones(2), torch.ones(3)]
        assert hvd.grouped_allreduce_(pair, op=hvd.Sum) is pair
        assert pair[1].tolist() == [R] * 3
        with torch.inference_mode():
            assert hvd.allreduce(torch.ones(2) * rank).tolist() == [(R - 1) / 2] * 2
            assert len(hvd.allgather(torch.ones(rank))) == R * (R - 1) / 2
        assert hvd.cross_rank() == 0
        return hvd.allgather_object({"rank": rank, "text": "x" * rank})

    assert hvd_ranks(travels, ranks=3) == [[{"rank": r, "text": "x" * r} for r in range(3)]] * 3


# --- errors: one sentence on every rank, and nothing waits for ever -------------------------------

def optimizer_of(names=("w",), **options):
    """Horovod's optimizer of one weight, which has these names."""
    w = nn.Parameter(torch.zeros(2))
    return w, hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), [(n, w) for n in names],
                                       **options)


REFUSED = {  # a sentence: on rank r, what is refused with it
    r"shape \(3,\) on rank 0, \(4,\) on rank 1": lambda r: hvd.allreduce(torch.ones(3 + r % 2)),
    "dtype torch.float32 on rank 0, torch.int64 on rank 1": lambda r: hvd.allreduce(
        ONES.long() if r % 2 else ONES),
    "op Sum on rank 0, Max on rank 1": lambda r: hvd.allreduce(ONES, op=(hvd.Sum, hvd.Max)[r % 2]),
    "'noname.4' .* kind allreduce on rank 0, allgather on rank 1": lambda r: (
        (hvd.allreduce, hvd.allgather)[r % 2](ONES)),
    "root 0 on rank 0, 1 on rank 1": lambda r: hvd.broadcast(ONES, r % 2),
    r"shape \('rows', 3\) on rank 0, \('rows', 4\) on rank 1": lambda r: hvd.allgather(
        torch.ones(2, 3 + r % 2)),
    "average=False is the old way to say op=": lambda r: hvd.allreduce(ONES, False),
    "op=9 is not one of hvd.Average": lambda r: hvd.allreduce(ONES, op=9),
    "root_rank=3 is not one of the 3 ranks": lambda r: hvd.broadcast(ONES, 3),
    "this one has no dimension": lambda r: hvd.allgather(torch.tensor(1.0)),
    "does not take torch.int16: give it a wider type": lambda r: hvd.grouped_allreduce(
        [ONES, ONES.short()]),
    "op=hvd.Max is not built for complex": lambda r: hvd.grouped_allreduce(
        [ONES, ONES + 0j], op=hvd.Max),
    r"elements of this tensor share memory, as x.expand": lambda r: hvd.allreduce_(
        torch.ones(1).expand(3)),
    "sparse and quantized tensors are not built": lambda r: hvd.broadcast(ONES.to_sparse(), 0),
    "3 is not a power of two": lambda r: hvd.allreduce(ONES, op=hvd.Adasum),
    "give it model.named_parameters": lambda r: hvd.DistributedOptimizer(
        torch.optim.SGD([ONES]), [ONES]),
    "given twice: w": lambda r: optimizer_of("ww"),
    "1 of the optimizer's 1 parameters have no name": lambda r: optimizer_of(""),
    "=0 must be 1 or more": lambda r: optimizer_of(backward_passes_per_step=0),
    "it needs op=Average": lambda r: optimizer_of(op=hvd.Sum, gradient_predivide_factor=2.0),
    r"call backward\(\) before step\(\)": lambda r: optimizer_of()[1].step(lambda: None),
}


def test_ranks_that_disagree_or_ask_for_what_is_not_there_are_told_and_go_on():
    def refused():
        for sentence, call in REFUSED.items():
            with pytest.raises(ValueError, match=sentence):
                call(hvd.rank())
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert hvd_ranks(refused, ranks=3) == [3.0] * 3


def error_of_a_call():
    with pytest.raises(hvd.HorovodInternalError) as error:
        hvd.allreduce(torch.ones(1), name="w")
    return str(error.value)


def test_a_tensor_that_a_rank_never_asks_for_is_told_of(capfd):
    def lonely():
        hvd.init(stall_check=0.5, stall_shutdown=1.5)
        if hvd.rank() == 1:  # it is told with its next call
            hvd.world.background().thread.join()
        return error_of_a_call()

    seen = launch(lonely, ranks=3, timeout=20)
    for text in (*seen, capfd.readouterr().out):
        assert re.search("'w' has waited [0-9.]+ s for rank 1; ranks? 0(, 2)? asked for it", text)


def test_when_the_thread_of_one_rank_ends_the_others_know_at_once():
    def breaks():
        hvd.init()  # stall_shutdown is 300 s, and this launch has 20
        if hvd.rank() == 1:
            hvd.world.background()._cycle = lambda: 1 / 0
        return error_of_a_call()

    for rank, said in enumerate(launch(breaks, ranks=3, timeout=20)):
        assert f"background thread on rank {rank} has ended: {'division' * (rank == 1)}" in said


# --- the optimizer, beside the exercise -----------------------------------------------------------

def test_compression_predivision_sum_several_passes_and_adasum():
    def moved(gradients, **options):
        w, optimizer = optimizer_of(**options)
        for gradient in gradients:
            (w * gradient).sum().backward()
        optimizer.step()
        return w.tolist()

    def steps():
        one = torch.tensor([1.0, hvd.rank()])
        return [
            moved([one], op=hvd.Sum), moved([one], gradient_predivide_factor=2.0),
            moved([one, one], backward_passes_per_step=2),
            # A sum of 60,000 on two ranks is infinite in 16 bits; divided before, it is not.
            moved([60000.0], compression=FP16, gradient_predivide_factor=2.0),
            moved([torch.eye(2)[hvd.rank()]], op=hvd.Adasum), moved([3.0], op=hvd.Adasum)]

    assert hvd_ranks(steps) == [[[-2.0, -1.0], [-1.0, -0.5], [-2.0, -1.0], [-60000.0] * 2,
                                 [-1.0, -1.0], [-3.0, -3.0]]] * 2


def test_races_are_errors_and_state_and_scheduler_live_on():
    def races():
        w, optimizer = optimizer_of()
        (w * 1.0).sum().backward()
        with pytest.raises(AssertionError, match=r"zero_grad\(\) came after backward\(\)"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step=1 times"):
            (w * 1.0).sum().backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="averages once more"):
            optimizer.step()
        w = nn.Parameter(torch.zeros(1))
        sgd = torch.optim.SGD([w], lr=1.0, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(sgd, step_size=1, gamma=0.1)
        w.grad = torch.ones(1)
        sgd.step()
        optimizer = hvd.DistributedOptimizer(sgd)
        (w * 2.0).sum().backward()  # on top of the gradient that is there: 3
        optimizer.step()  # momentum 0.5 * 1 + 3
        scheduler.step()
        return w.item(), optimizer.param_groups[0]["lr"]

    assert hvd_ranks(races) == [(-4.5, 0.1)] * 2


def test_a_fresh_optimizer_takes_over_the_state_of_rank_1():
    def take_over():
        torch.manual_seed(hvd.rank())
        net = nn.Linear(4, 3)
        groups = [{"params": [net.weight], "lr": 0.1 + hvd.rank()}, {"params": [net.bias]}]
        adam = torch.optim.AdamW(groups, amsgrad=True)
        if hvd.rank() == 1:  # the others have no state yet
            net(torch.ones(2, 4)).sum().backward()
            adam.step()
        hvd.broadcast_parameters(net.named_parameters(), root_rank=1)
        hvd.broadcast_optimizer_state(adam, root_rank=1)
        return [*adam.state_dict().values(), net.state_dict()]

    seen = hvd_ranks(take_over, ranks=3)
    assert len(seen[1][0]) == 2
    torch.testing.assert_close(seen, [seen[1]] * 3, rtol=0, atol=0)


# --- begin and end --------------------------------------------------------------------------------

def test_before_init_everything_is_a_sentence():
    for call in (hvd.rank, lambda: hvd.allreduce(torch.ones(1)), hvd.stop_timeline):
        with pytest.raises(ValueError, match=r"not been initialized; use hvd.init\(\)"):
            call()
    assert not hvd.is_initialized() and hvd.shutdown() is None


def test_init_again_leaves_no_groups_files_or_threads_and_all_have_rank_0s_config():
    def rounds():
        seen, process = [], psutil.Process()
        for _ in range(3):
            hvd.init(fusion_threshold=400 * dist.get_rank() + 8)
            hvd.init()
            hvd.grouped_allreduce([torch.ones(1 + i) for i in range(9)], op=hvd.Sum)
            threshold = hvd.world.background().config.fusion_threshold
            hvd.shutdown()
            groups = len(dist.distributed_c10d._world.pg_map)
            seen.append((threshold, groups, process.num_fds(), process.num_threads()))
        return seen

    for seen in launch(rounds, ranks=3):
        assert seen == [seen[0]] * 3 and seen[0][:2] == (8, 1)


def test_shutdown_of_one_rank_ends_the_waiting_of_the_others():
    def early():
        hvd.init()
        return [hvd.shutdown()] if hvd.rank() == 1 else [error_of_a_call(), error_of_a_call()]

    first, _, last = launch(early, ranks=3)
    assert all("rank 1 has called shutdown()" in said for said in first + last)


def test_config_comes_from_arguments_then_from_the_environment(monkeypatch):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1000")
    assert Config.from_environment(cycle_time_ms=0) == Config(1000, 0)
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "fast")
    for sentence, given in (("HOROVOD_CYCLE_TIME=fast is no number", {}),
                            ("stall_check=-1 must not be negative", {"stall_check": -1})):
        with pytest.raises(ValueError, match=sentence):
            Config(**given) if given else Config.from_environment()


def test_phases_are_nested_and_only_rank_0_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")  # Horovod's word for: start_timeline() begins

    def record():
        hvd.start_timeline(f"{tmp_path}/{hvd.rank()}.json")
        for _ in range(2):
            hvd.grouped_allreduce([torch.ones(5), torch.ones(5), torch.ones(40)], name="g")
            hvd.allgather(torch.ones(2), name="rows")
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(1), name="after")

    hvd_ranks(record, fusion_threshold=100)
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]
    phases = read_timeline(tmp_path / "0.json")  # as they begin, outer ones first
    whole = ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "QUEUE"]
    fused = [*whole, "MEMCPY_IN_FUSION_BUFFER", "GLOO_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"]
    gathered = ["NEGOTIATE_ALLGATHER", "ALLGATHER", "QUEUE"]
    for name, inside in {"g.0": fused, "g.1": fused, "g.2": [*whole, "GLOO_ALLREDUCE"],
                         "rows": gathered, "after": []}.items():
        assert [phase.name for phase in phases if phase.tensor == name] == 2 * inside
