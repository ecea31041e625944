"""ranklab.horovod: every verb, what goes wrong, how it begins and ends: no rank waits for ever."""

import json
import re
import subprocess
import sys

import psutil
import pytest
import torch
import torch.distributed as dist

import ranklab.horovod as hvd
from ranklab import launch
from ranklab.engine import torchrun
from ranklab.horovod.cost import fused_time, overlapped_time
from ranklab.horovod.settings import Settings


def hvd_ranks(fn, *args, ranks=2, nodes=1, **settings):
    """`fn(*args)` on ranks between init() and shutdown()."""

    def run():
        hvd.init(**{"stall_check": 10, "stall_shutdown": 20} | settings)
        value = fn(*args)
        hvd.barrier()
        hvd.shutdown()
        return value

    return launch(run, ranks=ranks, nodes=nodes, timeout=40)


def mine(rank, n=7, dtype=torch.float32):
    return ((torch.arange(n) * 3 + rank * 5) % 11 - 4).to(dtype)


def every_verb():
    rank, last, x = hvd.rank(), hvd.size() - 1, mine(hvd.rank())
    strided, there = (mine(rank, 6).view(2, 3).t() for _ in range(2))
    return {
        "sum": hvd.allreduce(x, op=hvd.Sum), "average": hvd.allreduce(x),
        "min": hvd.allreduce(x, op=hvd.Min), "product": hvd.allreduce(x, op=hvd.Product),
        "scaled": hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5),
        "whole": hvd.allreduce(mine(rank, dtype=torch.int64)),
        "fp16": hvd.allreduce(x, compression=hvd.Compression.fp16, op=hvd.Sum),
        "strided": hvd.allreduce(strided), "in place": hvd.allreduce_(strided), "then": strided,
        "rows": hvd.allgather(torch.full((rank, 2), rank)),
        "empty": hvd.allgather(torch.empty(0, 3)),
        "broadcast": hvd.broadcast(x, last), "there": hvd.broadcast_(there, 0), "x": x,
        "grouped": hvd.grouped_allreduce([x, mine(rank, 3), mine(rank, 2, torch.float64)]),
        "object": hvd.broadcast_object({"rank": rank} if rank == last else None, last)["rank"],
        "growing": [hvd.allreduce(torch.ones(1 + step // 2), name="x") for step in range(4)],
        "place": [hvd.local_rank(), hvd.local_size(), hvd.cross_size()],
    }


def test_every_verb_is_right(R=4):
    def mean(*shape):
        return sum(mine(r, *shape) for r in range(R)) / R

    xs = torch.stack([mine(r) for r in range(R)])
    strided = mean(6).view(2, 3).t()
    for rank, seen in enumerate(hvd_ranks(every_verb, ranks=R, nodes=2)):
        torch.testing.assert_close(seen, {
            "sum": xs.sum(0), "average": xs.mean(0), "min": xs.amin(0), "product": xs.prod(0),
            "scaled": xs.sum(0), "whole": xs.mean(0).trunc().long(), "fp16": xs.sum(0),
            "strided": strided, "in place": strided, "then": strided,
            "rows": torch.cat([torch.full((r, 2), r) for r in range(R)]),
            "empty": torch.empty(0, 3), "broadcast": mine(R - 1),
            "there": mine(0, 6).view(2, 3).t(), "x": mine(rank),
            "grouped": [mean(), mean(3), mean(2, torch.float64)], "object": R - 1,
            "growing": [torch.ones(n) for n in (1, 1, 2, 2)], "place": [rank % 2, 2, 2],
        })


def test_gradients_flow_back_through_allreduce_by_the_same_all_reduce():
    def flows():
        x = torch.ones(2, requires_grad=True)
        for options in ({}, {"op": hvd.Sum}, {"compression": hvd.Compression.fp16}):
            (hvd.allreduce(x, None, "x", **options) * (1.0 + hvd.rank())).sum().backward()
        return x.grad.tolist()

    assert hvd_ranks(flows, ranks=3) == [[2.0 + 6.0 + 2.0] * 2] * 3


# --- errors: one sentence on every rank, and nothing waits for ever -----------------------------

ONES = torch.ones(3)
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
    "3 is not a power of two": lambda r: hvd.allreduce(ONES, op=hvd.Adasum),
}


def test_ranks_that_disagree_or_ask_for_what_is_not_there_are_told_and_go_on():
    def refused():
        for sentence, call in REFUSED.items():
            with pytest.raises(ValueError, match=sentence):
                call(hvd.rank())
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert hvd_ranks(refused, ranks=3) == [3.0] * 3


def test_a_group_of_tensors_is_taken_whole_or_not_at_all():
    def asks_twice():
        if hvd.rank() == 0:
            held = hvd.allreduce_async(torch.ones(1), name="g.1")
            with pytest.raises(ValueError, match="'g.1' is still in the works on this rank"):
                hvd.grouped_allreduce([torch.ones(1)] * 3, name="g")
            first = hvd.allreduce_async(torch.ones(1), name="g.0")  # its name is free
        hvd.barrier()
        if hvd.rank() == 1:
            held, first = (hvd.allreduce_async(torch.zeros(1), name=n) for n in ("g.1", "g.0"))
        return hvd.synchronize(held).item(), hvd.synchronize(first).item(), hvd.poll(held)

    assert hvd_ranks(asks_twice) == [(0.5, 0.5, True)] * 2


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


# --- begin and end ------------------------------------------------------------------------------

def test_before_init_everything_is_a_sentence():
    for call in (hvd.rank, lambda: hvd.allreduce(torch.ones(1)), hvd.stop_timeline):
        with pytest.raises(ValueError, match=r"not been initialized; use hvd.init\(\)"):
            call()
    assert not hvd.is_initialized() and hvd.shutdown() is None


def test_init_again_leaves_no_groups_files_or_threads_and_all_have_rank_0s_settings():
    def rounds():
        seen, process = [], psutil.Process()
        for _ in range(3):
            hvd.init(fusion_threshold=400 * dist.get_rank() + 8)
            hvd.init()
            hvd.grouped_allreduce([torch.ones(1 + i) for i in range(9)], op=hvd.Sum)
            threshold = hvd.world.background().settings.fusion_threshold
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


SCRIPT = """
import sys
import torch
import ranklab.horovod as hvd
hvd.init()
with open(f"{sys.argv[1]}/rank{hvd.rank()}", "w") as file:     # what ranks print runs together
    print(hvd.size(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), file=file)
"""


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_script_without_shutdown_ends_well(tmp_path, monkeypatch, ranks):
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "trace.json"))
    if ranks:
        torchrun(tmp_path / "script.py", tmp_path, ranks=ranks)
    else:
        subprocess.run([sys.executable, tmp_path / "script.py", tmp_path], check=True, timeout=60)
    for rank in range(ranks or 1):
        assert (tmp_path / f"rank{rank}").read_text() == f"{ranks or 1} {ranks or 1}.0\n"
    assert "NEGOTIATE_ALLREDUCE" in (tmp_path / "trace.json").read_text()


# --- settings, costs, timelines -------------------------------------------------------------------

def test_settings_come_from_arguments_then_from_the_environment(monkeypatch):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1000")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2.5")
    assert Settings.from_environment(cycle_time_ms=None) == Settings(1000, 2.5)
    assert Settings.from_environment(cycle_time_ms=0) == Settings(1000, 0)
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "fast")
    with pytest.raises(ValueError, match="HOROVOD_CYCLE_TIME=fast is no number"):
        Settings.from_environment()
    with pytest.raises(ValueError, match="fusion_threshold=-1 must not be negative"):
        Settings(fusion_threshold=-1)


def test_a_full_buffer_waits_for_backward_and_many_small_ones_for_latencies():
    sizes, wire = [1000] * 10, 2 * 3 / 4 * 1e-6  # seconds of one tensor on 4 ranks, at 1 GB/s
    assert overlapped_time(sizes, 0, 1.0, 4, 0, 1e-9) == pytest.approx(1 + wire)
    assert overlapped_time(sizes, 10_000, 1.0, 4, 0, 1e-9) == pytest.approx(1 + 10 * wire)
    latencies = fused_time(sizes, 2000, 4, 1e-3, 1e-9)
    assert overlapped_time(sizes, 2000, 0.0, 4, 1e-3, 1e-9) == pytest.approx(latencies)


def test_phases_are_nested_and_only_rank_0_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")  # Horovod's word for: start_timeline() begins
    monkeypatch.chdir(tmp_path)

    def record():
        hvd.start_timeline(f"{tmp_path}/{hvd.rank()}.json")
        for _ in range(2):
            hvd.grouped_allreduce([torch.ones(5), torch.ones(5), torch.ones(40)], name="g")
            hvd.allgather(torch.ones(2), name="rows")
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(1), name="after")

    hvd_ranks(record, fusion_threshold=100)
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]
    trace = json.loads((tmp_path / "0.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in trace if e["ph"] == "M"}
    copies = ["MEMCPY_IN_FUSION_BUFFER", "GLOO_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"]
    inside = {"g.0": copies, "g.1": copies, "g.2": ["GLOO_ALLREDUCE"], "rows": []}
    assert set(names.values()) == set(inside)
    for row, name in names.items():
        events = [e for e in trace if e["pid"] == row and e["ph"] == "X"]
        kind = "ALLGATHER" if name == "rows" else "ALLREDUCE"
        expected = [kind, "QUEUE", *inside[name]]
        assert sorted(e["name"] for e in events) == sorted(2 * [
            f"NEGOTIATE_{kind}", "rank 0 is ready", "rank 1 is ready", *expected]), name
        for whole in (e for e in events if e["name"] == kind):
            end = whole["ts"] + whole["dur"] + 1e-3
            assert [e["name"] for e in events if e["dur"] and whole["ts"] <= e["ts"]
                    and e["ts"] + e["dur"] <= end] == expected
