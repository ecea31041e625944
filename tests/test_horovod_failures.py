"""ranklab.horovod when things go wrong, and how it begins and ends: no rank waits for ever."""

import os
import re
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from test_horovod import hvd_ranks

from ranklab import launch
from ranklab.engine import RankError

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
    hvd.allreduce(torch.ones(3), name="w")  # now it is in the cache
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
            ("root_rank=3 is not one of the ranks", lambda: hvd.broadcast(x, 3)),
            ("one of no dimension", lambda: hvd.allgather(torch.tensor(1.0))),
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


def lonely(hvd, how):
    if how == "cached":
        hvd.allreduce(torch.ones(1), name="w")
    if hvd.rank() != 1:
        try:
            hvd.join() if how == "join" else hvd.allreduce(torch.ones(1), name="w")
        except hvd.HorovodInternalError as error:
            return str(error)
    time.sleep(2.5)
    with pytest.raises(hvd.HorovodInternalError):  # the idle one is told with its next call
        hvd.allreduce(torch.ones(1))


@pytest.mark.parametrize("how, name", [("never seen", "w"), ("cached", "w"), ("join", "join")])
def test_a_tensor_that_a_rank_never_asks_for_is_told_of(how, name, capfd):
    def run():
        import ranklab.horovod as hvd

        hvd.init(stall_check=0.5, stall_shutdown=1.5)
        return lonely(hvd, how)

    seen = launch(run, ranks=3, timeout=20)
    sentence = f"'{name}' has waited [0-9.]+ s for rank 1; ranks? 0(, 2)? asked for it"
    for text in (seen[0], seen[2], capfd.readouterr().out):
        assert re.search(sentence, text), text


# --- begin and end ------------------------------------------------------------------------------


def test_before_init_everything_is_a_sentence():
    import ranklab.horovod as hvd

    for call in (hvd.rank, hvd.size, lambda: hvd.allreduce(torch.ones(1)), hvd.join,
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
import torch
import ranklab.horovod as hvd
hvd.init()
print(hvd.rank(), hvd.size(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
"""


@pytest.mark.parametrize("launcher, wanted", [
    ([], ["0 1 1.0"]),
    (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
     ["0 2 2.0", "1 2 2.0"])], ids=["python", "torchrun"])
def test_a_script_without_shutdown_ends_well(tmp_path, launcher, wanted):
    (tmp_path / "script.py").write_text(SCRIPT)
    environ = {"OMP_NUM_THREADS": "1", **os.environ, "HOROVOD_TIMELINE": str(tmp_path / "t.json")}
    done = subprocess.run([sys.executable, *launcher, tmp_path / "script.py"], env=environ,
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == wanted
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
