"""ranklab.horovod: every verb, what goes wrong, how it begins and ends: no rank waits for ever."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

import ranklab.horovod as hvd
from ranklab import launch
from ranklab.engine import RankError
from ranklab.horovod.execute import Executor, Job
from ranklab.horovod.requests import Handle, Request
from ranklab.horovod.trace import Recorder


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
        "min": hvd.allreduce(x, op=hvd.Min), "max": hvd.allreduce(x, op=hvd.Max),
        "product": hvd.allreduce(x, op=hvd.Product),
        "scaled": hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5),
        "whole": hvd.allreduce(mine(rank, dtype=torch.int64)),
        "fp16": hvd.allreduce(x, compression=hvd.Compression.fp16, op=hvd.Sum),
        "in place": hvd.allreduce_(x.clone()), "strided": hvd.allreduce(strided),
        "strided in place": hvd.allreduce_(strided), "strided, then": strided,
        "rows": hvd.allgather(torch.full((rank, 2), rank)),
        "empty": hvd.allgather(torch.empty(0, 3)),
        "broadcast": hvd.broadcast(x, last), "broadcast in place": hvd.broadcast_(there, 0),
        "broadcast, then": there, "x": x,
        "grouped": hvd.grouped_allreduce([x, mine(rank, 3), mine(rank, 2, torch.float64)]),
        "object": hvd.broadcast_object({"rank": rank}, last)["rank"],
        "object of one": hvd.broadcast_object(0.1 if rank == 0 else None),
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
            "sum": xs.sum(0), "average": xs.mean(0), "min": xs.amin(0), "max": xs.amax(0),
            "product": xs.prod(0), "scaled": xs.sum(0), "whole": xs.mean(0).trunc().long(),
            "fp16": xs.sum(0), "in place": xs.mean(0), "strided": strided,
            "strided in place": strided, "strided, then": strided,
            "rows": torch.cat([torch.full((r, 2), r) for r in range(R)]),
            "empty": torch.empty(0, 3), "broadcast": mine(R - 1),
            "broadcast in place": mine(0, 6).view(2, 3).t(),
            "broadcast, then": mine(0, 6).view(2, 3).t(), "x": mine(rank),
            "grouped": [mean(), mean(3), mean(2, torch.float64)], "object": R - 1,
            "object of one": 0.1, "growing": [torch.ones(n) for n in (1, 1, 2, 2)],
            "place": [rank % 2, 2, 2],
        })


# --- errors: one sentence on every rank, and nothing waits for ever -----------------------------

DISAGREE = {
    r"shape \(3,\) on rank 0, \(4,\) on rank 1": lambda r: hvd.allreduce(torch.ones(3 + r % 2)),
    "dtype torch.float32 on rank 0, torch.int64 on rank 1": lambda r: hvd.allreduce(
        torch.ones(3, dtype=(torch.float32, torch.int64)[r % 2])),
    "op Sum on rank 0, Max on rank 1": lambda r: hvd.allreduce(
        torch.ones(3), op=(hvd.Sum, hvd.Max)[r % 2]),
    "kind allreduce on rank 0, allgather on rank 1": lambda r: (
        (hvd.allreduce, hvd.allgather)[r % 2](torch.ones(3))),
    "root 0 on rank 0, 1 on rank 1": lambda r: hvd.broadcast(torch.ones(3), r % 2),
    r"shape \('rows', 3\) on rank 0, \('rows', 4\) on rank 1": lambda r: hvd.allgather(
        torch.ones(2, 3 + r % 2)),
}


def test_ranks_that_disagree_are_told_and_go_on():
    def disagree():
        for sentence, call in DISAGREE.items():
            with pytest.raises(hvd.Mismatch, match=rf"'noname.\d+' differs .*: {sentence}"):
                call(hvd.rank())
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert hvd_ranks(disagree, ranks=3) == [3.0] * 3


def test_bad_arguments_are_a_sentence_on_every_rank():
    def bad():
        x = torch.ones(2)
        for sentence, call in {
            "op=9 is not one of hvd.Average": lambda: hvd.allreduce(x, op=9),
            "root_rank=3 is not one of the 3 ranks": lambda: hvd.broadcast(x, 3),
            "this one has no dimension": lambda: hvd.allgather(torch.tensor(1.0)),
            "3 is not a power of two": lambda: hvd.allreduce(x, op=hvd.Adasum),
        }.items():
            with pytest.raises(ValueError, match=sentence):
                call()
        return True

    assert hvd_ranks(bad, ranks=3) == [True] * 3


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


def error_of(call):
    try:
        call()
    except hvd.HorovodInternalError as error:
        return str(error)


def test_a_tensor_that_a_rank_never_asks_for_is_told_of(capfd):
    def lonely():
        hvd.init(stall_check=0.5, stall_shutdown=1.5)
        if hvd.rank() != 1:
            return error_of(lambda: hvd.allreduce(torch.ones(1), name="w"))
        hvd.world.background().thread.join()  # the idle one is told with its next call
        return error_of(lambda: hvd.allreduce(torch.ones(1)))

    seen = launch(lonely, ranks=3, timeout=20)
    for text in (*seen, capfd.readouterr().out):
        assert re.search("'w' has waited [0-9.]+ s for rank 1; ranks? 0(, 2)? asked for it", text)


def test_when_the_thread_of_one_rank_ends_the_others_know_at_once():
    def breaks():
        def broken():
            raise MemoryError("no more")

        hvd.init()  # stall_shutdown is 300 s, and this launch has 20
        hvd.allreduce(torch.ones(1), name="w")
        if hvd.rank() == 1:
            hvd.world.background()._cycle = broken
        return error_of(lambda: hvd.allreduce(torch.ones(1), name="w"))

    for rank, said in enumerate(launch(breaks, ranks=3, timeout=20)):
        assert f"background thread on rank {rank} has ended: {'no more' * (rank == 1)}" in said


def test_on_a_gpu_streams_wait_for_each_other(monkeypatch):
    gpu, seen = torch.device("cuda", 0), []
    side = SimpleNamespace(wait_event=seen.append, synchronize=lambda: seen.append("done"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    tensor = SimpleNamespace(device=gpu, is_cuda=True, record_stream=seen.append)
    handle = Handle(Request("w", "allreduce"))
    handle.computed, handle.tensor, handle.output = "computed", tensor, tensor
    with Executor(0, None, Recorder(), gpu)._after_computing([Job(None, handle)]):
        seen.append("all-reduce")
    assert seen == ["computed", "all-reduce", "done"]
    handle.finish()
    assert hvd.synchronize(handle) is tensor and seen[3:] == ["current"]  # its memory is used there


# --- begin and end ------------------------------------------------------------------------------

def test_before_init_everything_is_a_sentence():
    for call in (hvd.rank, lambda: hvd.allreduce(torch.ones(1)), hvd.stop_timeline):
        with pytest.raises(ValueError, match=r"not been initialized; use hvd.init\(\)"):
            call()
    assert not hvd.is_initialized()
    hvd.shutdown()


def test_init_again_leaves_no_groups_files_or_threads_and_all_have_rank_0s_settings():
    def rounds():
        seen, process = [], psutil.Process()
        for _ in range(3):
            hvd.init(fusion_threshold=400 * dist.get_rank() + 8)
            hvd.init()
            sums = hvd.grouped_allreduce([torch.ones(1 + i) for i in range(9)], op=hvd.Sum)
            threshold = hvd.world.background().settings.fusion_threshold
            hvd.shutdown()
            hvd.shutdown()
            groups = len(dist.distributed_c10d._world.pg_map)
            seen.append((groups, threshold, sum(each.sum().item() for each in sums),
                         process.num_fds(), process.num_threads()))
        return seen

    for seen in launch(rounds, ranks=3):
        assert seen == [seen[0]] * 3 and seen[0][:3] == (1, 8, 3 * 45)


def test_shutdown_of_one_rank_ends_the_waiting_of_the_others():
    def early():
        hvd.init()
        if hvd.rank() == 1:
            return hvd.shutdown() or ""
        return [error_of(lambda: hvd.allreduce(torch.ones(1))) for _ in range(2)]

    for said in sum(filter(None, launch(early, ranks=3)), []):
        assert "rank 1 has called shutdown()" in said


def test_a_rank_that_raises_is_the_one_that_is_named():
    def raises():
        if hvd.rank() == 1:
            raise KeyError("mine")
        hvd.allreduce(torch.ones(1))

    with pytest.raises(RankError, match="rank 1 of 3 raised KeyError"):
        hvd_ranks(raises, ranks=3)


SCRIPT = """
import sys
import torch
import ranklab.horovod as hvd
hvd.init()
with open(f"{sys.argv[1]}/rank{hvd.rank()}", "w") as file:     # what ranks print runs together
    print(hvd.size(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), file=file)
"""


@pytest.mark.parametrize("launcher, wanted", [
    ([], ["1 1.0\n"]),
    (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], ["2 2.0\n"] * 2),
], ids=["python", "torchrun"])
def test_a_script_without_shutdown_ends_well(tmp_path, launcher, wanted):
    (tmp_path / "script.py").write_text(SCRIPT)
    environ = {"OMP_NUM_THREADS": "1", **os.environ, "HOROVOD_TIMELINE": str(tmp_path / "t.json")}
    done = subprocess.run([sys.executable, *launcher, tmp_path / "script.py", tmp_path],
                          env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{r}").read_text() for r in range(len(wanted))] == wanted
    assert "NEGOTIATE_ALLREDUCE" in (tmp_path / "t.json").read_text()
