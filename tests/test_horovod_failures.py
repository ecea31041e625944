"""ranklab.horovod when things go wrong, and how it begins and ends: no rank waits for ever."""

import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from test_horovod import hvd_ranks

from ranklab import launch
from ranklab.engine import RankError
from ranklab.horovod import synchronize
from ranklab.horovod.execute import Executor, Job
from ranklab.horovod.requests import Handle, Request
from ranklab.horovod.trace import Recorder

# --- errors: one sentence on every rank, and nothing waits for ever -----------------------------


def disagree(hvd, what):
    rank = hvd.rank()
    calls = {
        "shape": lambda: hvd.allreduce(torch.ones(3 + rank % 2), name="w"),
        "dtype": lambda: hvd.allreduce(torch.ones(3, dtype=(torch.float32, torch.int64)[rank % 2]),
                                       name="w"),
        "op": lambda: hvd.allreduce(torch.ones(3), name="w", op=(hvd.Sum, hvd.Max)[rank % 2]),
        "kind": lambda: (hvd.allreduce, hvd.allgather)[rank % 2](torch.ones(3), name="w"),
        "root": lambda: hvd.broadcast(torch.ones(3), rank % 2, name="w"),
        "prescale": lambda: hvd.allreduce(torch.ones(3), name="w", prescale_factor=1.0 + rank % 2),
        "rows": lambda: hvd.allgather(torch.ones(2, 3 + rank % 2), name="w"),
        "order": lambda: (hvd.allreduce, hvd.allgather)[rank % 2](torch.ones(3)),
    }
    hvd.allreduce(torch.ones(3), name="w")
    try:
        calls[what]()
    except ValueError as error:
        said = f"{type(error).__name__}: {error}"
    return said, hvd.allreduce(torch.ones(1), name="w", op=hvd.Sum).item()


@pytest.mark.parametrize("what, sentence", [
    ("shape", r"'w' differs between ranks: shape \(3,\) on rank 0, \(4,\) on rank 1"),
    ("dtype", r"'w' .*: dtype torch.float32 on rank 0, torch.int64 on rank 1"),
    ("op", "'w' .*: op Sum on rank 0, Max on rank 1"),
    ("kind", "'w' .*: kind allreduce on rank 0, allgather on rank 1"),
    ("root", "'w' .*: root 0 on rank 0, 1 on rank 1"),
    ("prescale", "'w' .*: prescale 1.0 on rank 0, 2.0 on rank 1"),
    ("rows", r"'w' .*: shape \(2, 3\) on rank 0, \(2, 4\) on rank 1"),
    ("order", "'noname.1' .*: kind allreduce on rank 0, allgather on rank 1"),
])
def test_ranks_that_disagree_are_told_and_go_on(what, sentence):
    seen = hvd_ranks(disagree, what, ranks=3)
    for said, after in seen:
        assert (said, after) == (seen[0][0], 3.0)
        assert re.search(f"Mismatch: .*{sentence}", said), said


def test_bad_arguments_are_a_sentence_on_every_rank():
    def bad(hvd):
        x = torch.ones(2)
        for sentence, call in (
            ("give one of them", lambda: hvd.allreduce(x, average=True, op=hvd.Sum)),
            ("op=9 is not one of hvd.Average", lambda: hvd.allreduce(x, op=9)),
            ("root_rank=3 is not one of the 3 ranks", lambda: hvd.broadcast(x, 3)),
            ("this one has no dimension", lambda: hvd.allgather(torch.tensor(1.0))),
            ("give it x.to_dense", lambda: hvd.allreduce(x.to_sparse())),
            ("3 is not a power of two", lambda: hvd.allreduce(x, op=hvd.Adasum)),
        ):
            with pytest.raises(ValueError, match=sentence):
                call()
        handle = hvd.allreduce_async(x, name="twice")
        if not hvd.poll(handle):
            with pytest.raises(ValueError, match="'twice' is still in the works on this rank"):
                while not hvd.poll(handle):
                    hvd.allreduce_async(x, name="twice")
                raise ValueError("'twice' is still in the works on this rank")  # it was quick
        hvd.synchronize(handle)
        return True

    assert hvd_ranks(bad, ranks=3, cycle_time_ms=20) == [True] * 3


def lonely(hvd):
    if hvd.rank() != 1:
        try:
            hvd.allreduce(torch.ones(1), name="w")
        except hvd.HorovodInternalError as error:
            return str(error)
    time.sleep(2.5)
    with pytest.raises(hvd.HorovodInternalError):  # the idle one is told with its next call
        hvd.allreduce(torch.ones(1))


def test_a_tensor_that_a_rank_never_asks_for_is_told_of(capfd):
    def run():
        import ranklab.horovod as hvd

        hvd.init(stall_check=0.5, stall_shutdown=1.5)
        return lonely(hvd)

    seen = launch(run, ranks=3, timeout=20)
    sentence = "'w' has waited [0-9.]+ s for rank 1; ranks? 0(, 2)? asked for it"
    for text in (seen[0], seen[2], capfd.readouterr().out):
        assert re.search(sentence, text), text


def test_a_group_of_tensors_is_taken_whole_or_not_at_all():
    def asks_twice(hvd):
        if hvd.rank() == 0:
            held = hvd.allreduce_async(torch.ones(1), name="g.1")
            with pytest.raises(ValueError, match="'g.1' is still in the works on this rank"):
                hvd.grouped_allreduce([torch.ones(1)] * 3, name="g")
            first = hvd.allreduce_async(torch.ones(1), name="g.0")  # its name is free
        hvd.barrier()
        if hvd.rank() == 1:
            held, first = (hvd.allreduce_async(torch.zeros(1), name=n) for n in ("g.1", "g.0"))
        return hvd.synchronize(held).item(), hvd.synchronize(first).item()

    assert hvd_ranks(asks_twice) == [(0.5, 0.5)] * 2


def test_when_the_thread_of_one_rank_ends_the_others_know_at_once():
    def breaks():
        import ranklab.horovod as hvd
        from ranklab.horovod.world import background

        hvd.init()  # stall_shutdown is 300 s, and this launch has 20
        hvd.allreduce(torch.ones(1), name="w")

        def broken():
            raise MemoryError("no more")

        if hvd.rank() == 1:
            background()._cycle = broken
        try:
            hvd.allreduce(torch.ones(1), name="w")
        except hvd.HorovodInternalError as error:
            return str(error)

    seen = launch(breaks, ranks=3, timeout=20)
    assert seen[1] == "Horovod's background thread on rank 1 has ended: no more"
    for rank in (0, 2):
        assert f"background thread on rank {rank} has ended: " in seen[rank], seen[rank]


# --- a GPU, as far as it can be tried without one -------------------------------------------------

def test_streams_wait_for_each_other(monkeypatch):
    gpu, seen = torch.device("cuda", 0), []
    side = SimpleNamespace(wait_event=seen.append,
                           synchronize=lambda: seen.append("done"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    tensor = SimpleNamespace(device=gpu, is_cuda=True, record_stream=seen.append)
    handle = Handle(Request("w", "allreduce"), output=tensor)
    handle.computed, handle.tensor = "computed", tensor
    with Executor(0, None, Recorder(), gpu)._after_computing([Job(None, handle)]):
        seen.append("all-reduce")
    assert seen == ["computed", "all-reduce", "done"]
    handle.finish()
    assert synchronize(handle) is tensor and seen[3:] == ["current"]  # its memory is used there


# --- begin and end ------------------------------------------------------------------------------

def test_before_init_everything_is_a_sentence():
    import ranklab.horovod as hvd

    for call in (hvd.rank, hvd.size, lambda: hvd.allreduce(torch.ones(1)),
                 hvd.stop_timeline):
        with pytest.raises(ValueError, match=r"not been initialized; use hvd.init\(\)"):
            call()
    assert not hvd.is_initialized()
    hvd.shutdown()


def test_init_again_after_shutdown_and_twice_at_once():
    def again():
        import ranklab.horovod as hvd

        seen = []
        for _ in range(3):
            hvd.init()
            hvd.init()
            seen.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
            hvd.shutdown()
            hvd.shutdown()
        return seen, dist.get_world_size(), hvd.is_initialized()

    assert launch(again, ranks=3) == [([3.0] * 3, 3, False)] * 3


def test_shutdown_leaves_no_groups_files_or_threads():
    def rounds():
        import ranklab.horovod as hvd

        seen, process = [], psutil.Process()
        for _ in range(3):
            hvd.init()
            hvd.allreduce(torch.ones(1))
            hvd.shutdown()
            groups = len(dist.distributed_c10d._world.pg_map)
            seen.append((groups, process.num_fds(), process.num_threads()))
        return seen

    for seen in launch(rounds, ranks=3):
        assert seen == [seen[0]] * 3 and seen[0][0] == 1


def test_all_ranks_have_the_settings_of_rank_0():
    def differ():
        import ranklab.horovod as hvd
        from ranklab.horovod.world import background

        rank = dist.get_rank()
        hvd.init(fusion_threshold=400 * rank + 8, cycle_time_ms=1 + rank)
        sums = hvd.grouped_allreduce([torch.ones(1 + i) for i in range(9)], op=hvd.Sum)
        settings = background().settings
        hvd.shutdown()
        return settings, [one.tolist() for one in sums]

    seen = launch(differ, ranks=3, timeout=20)
    assert seen == [seen[0]] * 3
    assert seen[0][0].fusion_threshold == 8 and seen[0][1] == [[3.0] * (1 + i) for i in range(9)]


def test_a_rank_that_ends_without_shutdown_leaves_nothing_behind():
    def forgets(n):
        import ranklab.horovod as hvd

        hvd.init()
        return hvd.allreduce(torch.tensor([n])).item()

    for n in range(8):
        assert launch(forgets, n, ranks=4) == [n] * 4


def test_shutdown_of_one_rank_ends_the_waiting_of_the_others():
    def early(hvd):
        if hvd.rank() == 1:
            hvd.shutdown()
            return None
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 1 has called shutdown\(\)"):
            hvd.allreduce(torch.ones(1))
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 1 has called shutdown\(\)"):
            hvd.allreduce(torch.ones(1))

    def run():
        import ranklab.horovod as hvd

        hvd.init()
        return early(hvd)

    assert launch(run, ranks=3) == [None] * 3


def test_a_rank_that_raises_is_the_one_that_is_named():
    def raises(hvd):
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


def _nothing():
    import ranklab.horovod as hvd

    hvd.init()
    hvd.shutdown()


def test_a_timeline_that_begins_later_is_no_file(tmp_path, monkeypatch):
    """Horovod's HOROVOD_TIMELINE=DYNAMIC means: start_timeline() will be called."""
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    monkeypatch.chdir(tmp_path)
    launch(_nothing, ranks=2)
    assert not list(tmp_path.iterdir())
