"""launch(stall=): a deadlock is said early, and nothing else is ever taken for one."""

import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from engine_hangs import HANGS

from ranklab import launch
from ranklab.checks.handles import Waits
from ranklab.engine import HangError, stall
from ranklab.engine.crew import Crew
from ranklab.engine.rank_handle import RankHandle
from ranklab.engine.report import Value

pytestmark = [pytest.mark.timeout(90), pytest.mark.skipif(
    not os.path.isdir("/proc/self/task"), reason="needs Linux")]

TIMEOUT = 40  # a machine so busy that no rank ever sleeps long enough only gets there later
DEADLOCKS = ("skipped collective", "both send first", "returned early", "forgotten barrier",
             "inside a model", "the collective itself")


def awaited():
    dist.irecv(torch.ones(1), 1 - dist.get_rank()).wait()


def error_of(fn, *args, **options):
    with pytest.raises(HangError) as caught:
        launch(fn, *args, timeout=TIMEOUT, **options)
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="needs Linux without GPUs")
@pytest.mark.parametrize("name", DEADLOCKS)
def test_a_deadlock_is_said_early(name):
    call, ranks = HANGS[name]
    text = error_of(*call, ranks=ranks, stall=0.4)
    assert f"of {ranks} wait for each other: all have slept in communication for 0.4 s\n" in text
    assert text.count("\n  rank ") == ranks and "waits in " in text


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="needs Linux without GPUs")
def test_in_a_cell_a_deadlock_is_said_without_asking():
    assert "all have slept in communication for 5 s" in error_of(awaited, ranks=2)


def watched():
    with Waits():
        awaited()


@pytest.mark.parametrize("call", [awaited, watched])
def test_a_handle_that_is_awaited(call):
    text = error_of(call, ranks=2, stall=0.4)
    assert "all have slept in communication" in text and text.count(".wait()") == 2


def send_late(how, *args):
    """Rank 1 answers late, and rank 0 waits."""
    x = torch.zeros(1)
    if dist.get_rank() == 1:
        how(*args)
        dist.send(x + 1, 0)
    else:
        dist.recv(x, 1)
    return x.item()


def in_a_thread():
    thread = threading.Thread(target=time.sleep, args=(1.5,))
    thread.start()
    thread.join()


def busy():
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        pass


def for_a_process():
    os.system("sleep 1.5")


def for_an_event():
    event = threading.Event()
    threading.Timer(1.5, event.set).start()
    event.wait()


@pytest.mark.parametrize("how", [lambda: time.sleep(1.5), in_a_thread, busy, for_a_process,
                                 for_an_event])
def test_who_waits_for_something_else_is_not_stuck(how):
    assert launch(send_late, how, ranks=2, timeout=TIMEOUT, stall=0.2) == [1.0, 0.0]


def test_a_thread_of_a_rank_that_has_returned_may_still_send():
    def work():
        x = torch.zeros(1)
        if dist.get_rank() == 1:
            threading.Timer(1.5, dist.send, (x + 1, 0)).start()
        else:
            dist.recv(x, 1)
        return x.item()

    assert launch(work, ranks=2, timeout=TIMEOUT, stall=0.2) == [1.0, 0.0]


def test_who_ends_while_asked_is_not_stuck(monkeypatch):
    ask = Crew._ask_where

    def ask_slowly(crew, handles):
        ask(crew, handles)
        crew._wait(crew._all_settled, TIMEOUT)

    monkeypatch.setattr(Crew, "_ask_where", ask_slowly)
    monkeypatch.setattr(RankHandle, "is_stuck", lambda handle: True)
    assert launch(send_late, time.sleep, 0.5, ranks=2, timeout=TIMEOUT, stall=0.1) == [1.0, 0.0]


def test_who_seems_stuck_once_is_asked_again(monkeypatch):
    """Its message was there, and it had not looked."""
    answers, said = iter([True, True]), RankHandle.is_stuck
    monkeypatch.setattr(RankHandle, "is_stuck", lambda handle: next(answers, said(handle)))
    assert launch(send_late, time.sleep, 0.5, ranks=2, timeout=TIMEOUT, stall=0.1) == [1.0, 0.0]
    assert not next(answers, None)  # they were asked


def test_a_wait_with_a_limit_of_its_own_is_no_deadlock():
    def work():
        if dist.get_rank() == 0:
            try:
                dist.monitored_barrier(timeout=timedelta(seconds=1.5))
            except RuntimeError:
                return "seen"

    assert launch(work, ranks=2, timeout=TIMEOUT, stall=0.2) == ["seen", None]


# what is looked at, without processes

def test_asleep_means_every_rank_at_every_look(monkeypatch):
    seen = {}
    monkeypatch.setattr(stall, "_look", seen.get)
    watch = stall.Watch(1.0)

    def looks(first, second, *awake):
        clock.append(clock[-1] + 0.2)
        seen.update({0: first and (first, set(awake)), 1: second and (second, set())})
        return watch.all_asleep(range(2), clock[-1])

    clock = [0.0]
    assert [looks(5, 7) for _ in range(8)] == [False] * 7 + [True]
    assert not any(looks(5, 7) for _ in range(7))  # it has begun anew
    assert not looks(5, None)  # a main thread is about to run
    assert not any(looks(5, 7) for _ in range(7))
    assert not looks(9, 7)  # it has used the CPU
    assert not any(looks(9, 7) for _ in range(6)) and looks(9, 7)
    assert not any(looks(9, 7, "gloo a") or looks(9, 7, "gloo b") for _ in range(3))
    assert not looks(9, 7, "gloo a") and looks(9, 7)  # each had its turn
    assert not any(looks(9, 7, "gloo a") for _ in range(20))  # starved


def test_few_looks_in_a_long_time_are_not_enough(monkeypatch):
    """This process was starved itself, or the machine slept."""
    monkeypatch.setattr(stall, "_look", lambda pid: (5, set()))
    watch = stall.Watch(1.0)
    assert not any(watch.all_asleep([1], second) for second in range(0, 50, 10))


def test_a_main_thread_that_runs_is_not_asleep():
    assert stall._look(os.getpid()) is None  # this one runs
    assert stall._look(2**22 + 1) is None  # no such process


STUCK = {
    'File "{torch}/distributed/distributed_c10d.py", line 1 in all_reduce': True,
    'File "{torch}/distributed/distributed_c10d.py", line 1 in monitored_barrier': False,
    'File "{torch}/nn/modules/linear.py", line 1 in forward': False,
    'File "{mine}", line 1 in work': True,
    'File "{mine}", line 2 in work': False,
    'File "{mine}", line 3 in work': False,
    'File "{mine}", line 4 in work': False,
}


@pytest.mark.parametrize("innermost", STUCK)
def test_stuck_is_read_from_the_stack(innermost, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("handle.wait()\nos.wait()\ntime.sleep(9)\nhandle.wait(limit)\n")
    frames = [innermost.format(mine=mine, torch="/venv/site-packages/torch"),
              f'File "{mine}", line 3 in main', 'File "<string>", line 1 in <module>']
    text = "Current thread 0x01 (most recent call first):\n  " + "\n  ".join(frames) + "\n"
    handle = RankHandle(0, None, None, stack=bytearray(text.encode()))
    assert handle.is_stuck() == STUCK[innermost]
    handle.stack = bytearray(b"Thread 0x02 (most recent call first):\n" + text.encode())
    assert not handle.is_stuck()  # the other thread may go on
    handle.stack, handle.report = bytearray(text.encode()), Value(b"")
    assert handle.is_stuck()
