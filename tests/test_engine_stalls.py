"""launch(stall=): a deadlock is said early, and nothing else is ever taken for one."""

import itertools
import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from engine_hangs import HANGS
from engine_waits import (LATE, OTHERS, RIGHT, WRONG, a_group_with_other_processes,
                          send_late)

from ranklab import launch
from ranklab.checks.handles import Waits
from ranklab.engine import HangError, stall, verdict
from ranklab.engine.worker_group import WorkerGroup
from ranklab.engine.rank_handle import RankHandle
from ranklab.engine.report import Value

pytestmark = [pytest.mark.timeout(90), pytest.mark.skipif(
    not os.path.isdir("/proc/self/task"), reason="needs Linux")]
no_gpus = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="needs Linux without GPUs")

TIMEOUT = 40  # a machine so busy that no rank ever sleeps long enough only gets there later
DEADLOCKS = {
    "skipped collective":
        "ranks 0, 2 of 3 wait forever: all have slept in communication for 0.4 s, and rank 1 has "
        "returned",
    "both send first":
        "ranks 0, 1 of 2 wait for each other: all have slept in communication for 0.4 s",
    "returned early":
        "rank 1 of 2 waits forever: it has slept in communication for 0.4 s, and rank 0 has "
        "returned",
    "in a thread":
        "ranks 0, 1 of 2 wait for each other: all have slept in communication for 0.4 s",
    "the collective itself":
        "ranks 0, 1 of 2 wait for each other: all have slept in communication for 0.4 s",
}


def awaited():
    dist.irecv(torch.ones(1), 1 - dist.get_rank()).wait()


def error_of(fn, *args, **options):
    with pytest.raises(HangError) as caught:
        launch(fn, *args, timeout=TIMEOUT, **options)
    return str(caught.value)


def at_once(call, programs):
    """{program: what `call` returned or raised}, of all at the same time."""
    def work(program):
        try:
            found[program] = call(program)
        except Exception as error:
            found[program] = error

    launch(int, ranks=1)
    found = {}
    threads = [threading.Thread(target=work, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@no_gpus
@pytest.mark.parametrize("name", DEADLOCKS)
def test_a_deadlock_is_said_early(name):
    call, ranks = HANGS[name]
    first, *others = error_of(*call, ranks=ranks, stall=0.4).splitlines()
    assert first == DEADLOCKS[name]
    assert len(others) == ranks and all(line.startswith("  rank ") for line in others)
    assert sum("  waits " in line for line in others) == ranks - ("returned" in first)


@no_gpus
def test_what_torch_awaits_is_said_early_and_idle_helpers_hide_nothing(capfd):
    errors = at_once(lambda fn: launch(fn, ranks=2, timeout=TIMEOUT, stall=0.4), WRONG)
    for fn, error in errors.items():
        assert isinstance(error, HangError) and "slept in communication" in str(error), (fn, error)
        assert f", in {fn.__name__}:  " in str(error) or "one_more_all_reduce" in str(error), error


@no_gpus
def test_in_a_cell_a_deadlock_is_said_without_asking():
    assert "all have slept in communication for 5 s" in error_of(awaited, ranks=2)


def watched():
    with Waits():
        awaited()


@pytest.mark.parametrize("call", [awaited, watched])
def test_a_handle_that_is_awaited(call):
    text = error_of(call, ranks=2, stall=0.4)
    assert "all have slept in communication" in text and text.count(".wait()") == 2


def test_who_waits_for_something_else_is_not_stuck():
    options = {"ranks": 2, "timeout": TIMEOUT, "stall": 0.2}
    values = at_once(lambda how: launch(send_late, how, **options), LATE)
    values |= at_once(lambda fn: launch(fn, **options), OTHERS)
    assert values == {fn: [RIGHT] * 2 for fn in LATE + OTHERS}


def test_a_group_that_others_may_belong_to_is_not_judged(tmp_path):
    with pytest.raises(HangError, match="did not finish within 2 s"):
        launch(a_group_with_other_processes, str(tmp_path / "store"), ranks=2, timeout=2,
               stall=0.2)


def test_who_ends_while_asked_is_not_stuck(monkeypatch):
    ask = WorkerGroup._ask_where

    def ask_slowly(group, handles):
        ask(group, handles)
        group._wait(group._all_settled, TIMEOUT)

    monkeypatch.setattr(WorkerGroup, "_ask_where", ask_slowly)
    monkeypatch.setattr(RankHandle, "waits", property(lambda handle: True, lambda *_: None))
    assert launch(send_late, lambda: time.sleep(0.5), ranks=2, timeout=TIMEOUT,
                  stall=0.1) == [RIGHT] * 2


def test_who_seems_stuck_once_is_asked_again(monkeypatch, tmp_path):
    """Its message was there, and it had not looked."""
    asked, hear = tmp_path / "asked", RankHandle.hear

    def hear_wrongly(handle, said):
        hear(handle, said)
        if b"n" in said and not asked.exists():
            asked.touch()
            handle.waits = True

    def until_asked():  # a busy machine's ranks seldom sleep as long as they must to be asked
        while not asked.exists():
            time.sleep(0.3)
        time.sleep(0.5)

    monkeypatch.setattr(RankHandle, "hear", hear_wrongly)
    assert launch(send_late, until_asked, ranks=2, timeout=TIMEOUT, stall=0.1) == [RIGHT] * 2


# what is looked at, without processes

def test_asleep_means_every_rank_at_every_look(monkeypatch):
    seen = {}
    monkeypatch.setattr(stall, "_look", lambda pid, reads_store: seen.get(pid))
    watch = stall.Watch(1.0)

    def looks(first, second, *awake):
        clock.append(clock[-1] + 0.2)
        seen.update({0: first and ((first, 0), set(awake)),
                     1: second and ((second, 0), set())})
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


def test_who_writes_may_send(monkeypatch):
    writes = iter(range(20))
    monkeypatch.setattr(stall, "_look", lambda *_: ((5, next(writes)), set()))
    watch = stall.Watch(0.1)
    assert not any(watch.all_asleep([1], second) for second in range(20))


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="needs Linux")
def test_gloo_sends_by_writing():
    """What stall.py counts, on this machine and in this version of torch."""
    def writes():
        dist.barrier()
        before = stall._counter("/proc/self/io", "syscw")
        dist.all_reduce(torch.ones(3))
        return stall._counter("/proc/self/io", "syscw") - before

    assert min(launch(writes, ranks=2)) > 0
    assert stall._counter("/proc/self/none", "syscw") is None


def test_a_main_thread_that_reads_the_store_sleeps_once_it_has_read_often(monkeypatch):
    sleeps = {}
    monkeypatch.setattr(stall, "_sleeps", lambda pid, thread: sleeps[pid])
    monkeypatch.setattr(stall, "_look", lambda pid, reads: ((5, 0), set()) if reads else None)
    watch = stall.Watch(0.1)

    def asleep(slept, call):
        sleeps[1] = slept
        return any([watch.all_asleep([1], next(seconds), {1: call}) for _ in range(stall.LOOKS)])

    seconds = itertools.count()
    assert [asleep(slept, 1) for slept in (50, 149, 150)] == [False, False, True]
    assert not asleep(160, 2)  # the next call begins anew
    assert not any(watch.all_asleep([1], next(seconds)) for _ in range(20))  # in no such call


def test_few_looks_in_a_long_time_are_not_enough(monkeypatch):
    """This process was starved itself, or the machine slept."""
    monkeypatch.setattr(stall, "_look", lambda *_: ((5, 0), set()))
    watch = stall.Watch(1.0)
    assert not any(watch.all_asleep([1], second) for second in range(0, 50, 10))


def test_a_main_thread_that_runs_is_not_asleep():
    assert stall._look(os.getpid()) is None  # this one runs
    assert stall._look(2**22 + 1) is None  # no such process


def test_an_answer_counts_if_it_is_that_of_the_last_question():
    here, there = socket.socketpair()
    with here, there:
        handle = RankHandle(0, here, None)
        handle.ask()
        assert not handle.has_answered()
        handle.hear(b"sy")
        assert handle.has_answered() and handle.waits
        handle.ask()
        handle.ask()
        handle.hear(b"y")  # late, of the first of the two
        assert not handle.has_answered() and not handle.waits
        handle.hear(b"n")
        assert handle.has_answered() and not handle.waits


def test_one_rank_is_one():
    handles = [RankHandle(0, None, None)]
    assert str(verdict.deadlock(handles, handles, 5)).startswith(
        "rank 0 of 1 waits forever: it has slept in communication for 5 s\n")
    handles += [RankHandle(r, None, None, report=Value(b""), seconds=1) for r in (1, 2)]
    assert str(verdict.deadlock(handles, handles[:1], 5)).startswith(
        "rank 0 of 3 waits forever: it has slept in communication for 5 s, and ranks 1, 2 have "
        "returned\n")


def test_ranks_that_get_no_core_have_longer(monkeypatch):
    queued = iter([0.5, 1.5, *[30] * 9])
    monkeypatch.setattr(stall, "seconds_in_queue", lambda pid: next(queued))
    assert launch(time.sleep, 2, ranks=1, timeout=1) == [None]
    monkeypatch.setattr(stall, "seconds_in_queue", lambda pid: 30)
    with pytest.raises(HangError, match="within 0.2 s \\(and 3.8 s that they waited"):
        launch(time.sleep, 60, ranks=1, timeout=0.2)


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="needs Linux")
def test_seconds_in_queue():
    def burn():
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # all of them on one core
        dist.barrier()
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        return stall.seconds_in_queue(os.getpid())

    assert max(launch(burn, ranks=3)) > 0.3
    assert stall.seconds_in_queue(os.getpid()) < 1e6 and stall.seconds_in_queue(-1) == 0
