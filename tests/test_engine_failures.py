"""launch when ranks raise, die or hang: the right words, in time, and nothing is left."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from engine_tools import alive, eventually, python_run, ranks_alive, write

from ranklab import launch
from ranklab.engine import HangError, RankError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert eventually(lambda: not ranks_alive(), 3), "ranks are left"


def error_of(fn, *args, **options):
    """The RankError that launch raises; its text never shows the engine's own files."""
    with pytest.raises(RankError) as caught:
        launch(fn, *args, **options)
    assert "ranklab/engine" not in str(caught.value), caught.value
    return caught.value


def states_of(error):
    """What a HangError says of each rank."""
    lines = str(error).splitlines()[1:]
    assert [line[:8] for line in lines] == [f"  rank {r}" for r in range(len(lines))], error
    return [line[8:].strip() for line in lines]


# a rank raises

def test_one_rank_raises_while_the_others_wait():
    def work():
        if dist.get_rank() == 1:
            raise ValueError("no luck")
        dist.barrier()

    error = error_of(work, ranks=4)
    assert error.rank == 1 and error.failures[1] == "ValueError: no luck"
    assert str(error).startswith("rank 1 of 4 raised ValueError: no luck\n")
    assert ', in work\n      raise ValueError("no luck")' in str(error)


def test_all_ranks_raise():
    def work():
        raise KeyError(dist.get_rank() % 2)

    error = error_of(work, ranks=4)
    assert error.rank == 0 and str(error).startswith("rank 0 of 4 raised KeyError: 0\n")
    assert str(error).endswith("\nrank 2: the same\nranks 1, 3: KeyError: 1") or (
        str(error).endswith("\nranks 1, 3: KeyError: 1\nrank 2: the same")), error


def test_the_cause_of_an_error_is_told():
    def work():
        try:
            int("three")
        except ValueError as error:
            raise RuntimeError("not a number of ranks") from error

    text = str(error_of(work, ranks=1))
    assert "raised RuntimeError: not a number of ranks" in text
    assert text.index('int("three")') < text.index("which led to") < text.index("raise Runtime")


def test_an_error_in_torch_shows_the_learners_line():
    def work():
        x = torch.ones(2) @ torch.ones(3)
        return x

    text = str(error_of(work, ranks=1))
    assert "x = torch.ones(2) @ torch.ones(3)" in text and text.count("line") == 1


def test_sys_exit_and_errors_that_cannot_be_pickled():
    class Odd(Exception):
        def __init__(self, lock):
            super().__init__("odd")
            self.lock = lock

    def odd():
        raise Odd(threading.Lock())

    assert "rank 0 of 1 raised SystemExit: exit code 3" in str(error_of(sys.exit, 3, ranks=1))
    assert "rank 0 of 1 raised Odd: odd" in str(error_of(odd, ranks=1))


def test_a_rank_that_loses_its_peer_is_not_blamed():
    def work():
        if dist.get_rank() == 2:
            dist.destroy_process_group()
            raise ValueError("first")
        dist.all_reduce(torch.ones(1_000_000))

    error = error_of(work, ranks=3)
    assert error.rank == 2 and "raised ValueError: first" in str(error)


# a rank dies

def test_os_exit():
    error = error_of(lambda: os._exit(7) if dist.get_rank() == 2 else dist.barrier(), ranks=3)
    assert error.rank == 2
    assert "rank 2 of 3 ended without returning (os._exit, exit code 7)" in str(error)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_by_a_signal(number):
    def work():
        if dist.get_rank() == 0:
            os.kill(os.getpid(), number)
        dist.barrier()

    error = error_of(work, ranks=3)
    assert error.rank == 0 and f"rank 0 of 3 was killed by {number.name}" in str(error)
    assert ("memory ran out" in str(error)) == (number == signal.SIGKILL)


def test_a_segmentation_fault_names_the_line():
    def work():
        if dist.get_rank() == 1:
            ctypes.string_at(0)
        dist.barrier()

    error = error_of(work, ranks=2)
    assert error.rank == 1 and "rank 1 of 2 was killed by SIGSEGV" in str(error)
    assert "ctypes.string_at(0)" in str(error)


def test_what_a_dead_rank_printed_is_shown(capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    def work():
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)

    error_of(work, ranks=1)
    assert "[rank 0] last words\n" in capfd.readouterr().out


# a hang

def hang_of(fn, *args, ranks, timeout=1.0):
    """What the HangError says of each rank; it came in time."""
    started = time.monotonic()
    error = error_of(fn, *args, ranks=ranks, timeout=timeout)
    assert time.monotonic() - started < timeout + 5  # the engine's promise
    assert isinstance(error, HangError) and isinstance(error, TimeoutError)
    assert f"of {ranks} did not finish within {timeout:g} s" in str(error)
    return states_of(error)


def test_a_skipped_collective():
    def work():
        if dist.get_rank() != 1:
            dist.all_reduce(torch.ones(3))

    states = hang_of(work, ranks=3)
    assert states[1].startswith("finished after ")
    for rank in (0, 2):
        assert states[rank].startswith("waits in all_reduce at ")
        assert states[rank].endswith(", in work:  dist.all_reduce(torch.ones(3))")


def test_both_send_first():
    def exchange(x):
        peer = 1 - dist.get_rank()
        dist.send(x, peer)
        dist.recv(x, peer)

    def work():
        exchange(torch.ones(4))

    for state in hang_of(work, ranks=2):
        assert state.startswith("waits in send at ")
        assert state.endswith(", in exchange:  dist.send(x, peer)")


def test_an_endless_loop():
    def work():
        while dist.get_rank() == 0:
            pass
        dist.barrier()

    looping, waiting = hang_of(work, ranks=2)
    assert looping.startswith("is at ") and looping.endswith(":  while dist.get_rank() == 0:") or (
        looping.endswith(":  pass"))
    assert waiting.startswith("waits in barrier at ")


def test_a_rank_that_returned_early():
    def work():
        for step in range(3):
            if dist.get_rank() == 0 and step == 2:
                return
            dist.all_gather([torch.empty(1), torch.empty(1)], torch.ones(1))

    states = hang_of(work, ranks=2)
    assert states[0].startswith("finished after ") and "waits to be released" in states[0]
    assert states[1].startswith("waits in all_gather at ")


def test_a_forgotten_barrier_is_not_supplied_by_the_engine():
    def work():
        if dist.get_rank() == 0:
            dist.barrier()

    states = hang_of(work, ranks=2)
    assert states[0].startswith("waits in barrier") and states[1].startswith("finished")


def test_a_collective_inside_a_model_is_named():
    def work():
        class Gather(torch.nn.Module):
            def forward(self, x):
                return dist.all_gather_object([None, None], x)

        if dist.get_rank() == 0:
            Gather()(torch.ones(1))

    assert hang_of(work, ranks=2)[0].startswith("waits in all_gather_object at ")


def test_the_function_itself_may_be_the_collective():
    assert hang_of(dist.recv, torch.ones(1), ranks=2) == ["waits in recv"] * 2


def test_a_wait_in_a_thread_of_the_rank():
    def work():
        thread = threading.Thread(target=dist.recv, args=(torch.ones(1), 1 - dist.get_rank()))
        thread.start()
        thread.join()

    assert all(s.endswith("thread.join()") for s in hang_of(work, ranks=2))


def test_time_is_up_before_the_ranks_have_begun():
    assert len(hang_of(dist.get_rank, ranks=4, timeout=0.001)) == 4


def test_a_rank_that_will_not_end_after_its_return():
    def work():
        import atexit

        atexit.register(time.sleep, 100)
        return 3

    started = time.monotonic()
    assert launch(work, ranks=1, timeout=1) == [3]
    assert time.monotonic() - started < 6


def test_a_rank_that_stops_answering():
    states = hang_of(lambda: os.kill(os.getpid(), signal.SIGSTOP), ranks=1)
    assert states == ["did not say where: it was still starting, or answers no signals"]


def test_an_endless_loop_that_prints(capfd):
    def work():
        while True:
            print("x" * 1000)

    before = psutil.Process().memory_info().rss
    error_of(work, ranks=1, timeout=1)
    assert psutil.Process().memory_info().rss - before < 200e6
    shown = capfd.readouterr().out
    assert len(shown) < 11e6 and shown.startswith("[rank 0] xxx")


def test_workers_of_a_killed_rank_go_too():
    def work():
        data = torch.utils.data.DataLoader(range(1000), num_workers=2)
        for _ in data:
            time.sleep(1)

    error_of(work, ranks=2, timeout=1)


# the process that forks ranks

def server():
    return next(p for p in psutil.Process().children()
                if "ranklab.engine.server" in " ".join(p.cmdline()))


def test_the_server_is_killed_between_launches():
    assert launch(dist.get_rank, ranks=2) == [0, 1]
    first = server()
    first.kill()
    assert launch(dist.get_rank, ranks=2) == [0, 1]
    assert server().pid != first.pid


def test_the_server_is_killed_during_a_launch():
    launch(dist.get_rank, ranks=1)
    threading.Timer(0.5, server().kill).start()
    with pytest.raises(RuntimeError, match="the process that forks ranks has died; its ranks went"):
        launch(time.sleep, 60, ranks=3)
    assert eventually(lambda: not ranks_alive(), 3)
    assert launch(dist.get_rank, ranks=2) == [0, 1]


def test_the_system_will_not_start_more_processes(tmp_path):
    script = write(tmp_path / "no_more.py", """
        import os
        from ranklab import launch
        from ranklab.engine.forkserver import fork_server
        import ranklab.engine.server

        launch(int, ranks=1)
        # The answer of a server whose fork failed, from a stand-in.
        real = fork_server().connect
        class Refuses:
            def connect(self):
                import socket, threading
                mine, theirs = socket.socketpair()
                def answer():
                    socket.recv_fds(theirs, 4096, 5)
                    theirs.send(b'{"forked": 0, "error": "Cannot allocate memory"}\\n')
                threading.Thread(target=answer, daemon=True).start()
                self.kept = theirs
                return mine
        import sys
        sys.modules["ranklab.engine.launch"].fork_server = Refuses
        try:
            launch(int, ranks=2)
        except RuntimeError as error:
            print(error)
        """)
    output, errors = python_run(script, tmp_path).communicate(timeout=50)
    assert output == ("launch: the system would not start rank 0 of 2: "
                      "Cannot allocate memory\n"), errors


def test_a_preload_that_fails_is_one_sentence(tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "cloudpickle.py").write_text("raise ImportError('this one is broken on purpose')\n")
    script = write(tmp_path / "script.py", f"""
        import os
        from ranklab import launch
        import cloudpickle                       # the kernel has the good one
        os.environ["PYTHONPATH"] = {str(broken)!r}
        try:
            launch(int, ranks=1)
        except RuntimeError as error:
            print(error)
        del os.environ["PYTHONPATH"]
        print(launch(int, ranks=2))              # and all is well again
        """)
    output, errors = python_run(script, tmp_path).communicate(timeout=50)
    assert output.splitlines() == [
        "launch: the process that forks ranks did not start: "
        "ImportError: this one is broken on purpose", "[0, 0]"], errors


# Ctrl-C

def test_an_interrupt_ends_the_ranks_and_says_where_they_were():
    def work():
        dist.recv(torch.ones(1), 1 - dist.get_rank())

    launch(int, ranks=1)
    timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt, match="the ranks were interrupted after") as caught:
        launch(work, ranks=2, timeout=30)
    assert str(caught.value).count("waits in recv at") == 2
    assert not ranks_alive()


@pytest.mark.timeout(120)
def test_interrupts_at_any_moment_leave_nothing(tmp_path):
    """Also during the start of the server, between fork and the first read, and while it ends."""
    script = write(tmp_path / "interrupted.py", """
        import os, random, signal, sys, threading, time
        import torch.distributed as dist
        from ranklab import launch

        def count():
            return len(os.listdir("/proc/self/fd")), threading.active_count()

        def interrupted(seconds, ranks):
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                launch(dist.barrier, ranks=ranks)
            except KeyboardInterrupt:
                return True
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)

        signal.signal(signal.SIGALRM, signal.default_int_handler)
        draw = random.Random(int(sys.argv[1]))
        launch_started = interrupted(0.6, 2)     # torch is being imported
        assert launch(dist.get_rank, ranks=2) == [0, 1]
        before = count()
        hits = 0
        for _ in range(40):
            try:
                hits += bool(interrupted(draw.uniform(0.0005, 0.25), 3))
            except KeyboardInterrupt:            # it came after launch had returned
                pass
        assert launch(dist.get_rank, ranks=2) == [0, 1]
        print("interrupted", hits, *before, *count(), flush=True)
        input()
        """)
    process = subprocess.Popen([sys.executable, str(script), "7"], text=True, cwd=tmp_path,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        word, hits, *counts = process.stdout.readline().split()
        assert word == "interrupted" and int(hits) >= 5
        fds_before, threads_before, fds_after, threads_after = map(int, counts)
        assert fds_after <= fds_before + 2 and threads_after <= threads_before
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) == 1, below  # the server
        process.communicate("\n", timeout=20)
        assert process.returncode == 0
        assert eventually(lambda: not any(p.is_running() for p in below), 3)
    finally:
        process.kill()


def test_the_interpreter_may_end_while_a_thread_launches(tmp_path):
    script = write(tmp_path / "leaves.py", """
        import threading, time
        from ranklab import launch

        launch(int, ranks=1)
        threading.Thread(target=launch, args=(time.sleep, 60), daemon=True).start()
        time.sleep(0.5)
        """)
    process = python_run(script, tmp_path)
    process.communicate(timeout=50)
    assert process.returncode == 0
    assert eventually(lambda: not alive(process.mark), 3)
