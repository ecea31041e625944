"""launch where something odd happens: strange errors and values, forks, no keyboard, no folder."""

import builtins
import io
import os
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from engine_tools import eventually, python_run, servers, write

from ranklab import launch
from ranklab.engine import RankError, server_lines, ship, verdict, worker_group
from ranklab.engine.rank_handle import RankHandle
from ranklab.engine.report import Failure, Value, describe_exit, rank_names

pytestmark = pytest.mark.timeout(60)


def error_of(fn, *args, **options):
    with pytest.raises(RankError) as caught:
        launch(fn, *args, **options)
    assert "ranklab/engine" not in str(caught.value), caught.value
    return caught.value


# errors of every kind

@pytest.mark.parametrize("error", [
    ConnectionRefusedError(111, "Connection refused"), BrokenPipeError(32, "Broken pipe"),
    RuntimeError("the download failed: connection closed by the server"),
    OSError("Connection reset by peer")])
def test_a_connection_of_the_learners_own_is_told_in_its_own_words(error):
    def work():
        raise error

    failed = error_of(work, ranks=1)
    assert str(failed).startswith(f"rank 0 of 1 raised {type(error).__name__}: {error}\n")
    assert failed.failures == {0: f"{type(error).__name__}: {error}"}


def test_the_words_of_a_backend_for_a_lost_peer():
    lost = [("RuntimeError", "[/pytorch/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by "
             "peer [127.0.0.1]:4006. This is typically caused by a remote worker crashing."),
            ("RuntimeError", "[/pytorch/gloo/gloo/transport/tcp/pair.cc:68] Read error "
             "[127.0.0.1]:22: Connection reset by peer"),
            ("RuntimeError", "[../gloo/transport/tcp/pair.cc:9] writev [127.0.0.1]:2: Broken pipe"),
            ("DistNetworkError", "failed to recv, got 0 bytes"),
            ("DistBackendError", "NCCL error: ncclRemoteError: A call failed possibly due to ...")]
    assert all(Failure(kind, message, ()).is_lost_peer() for kind, message in lost)
    own = [("ConnectionError", lost[0][1]), ("RuntimeError", "connection closed"),
           ("RuntimeError", "[../gloo/transport/tcp/pair.cc:9] invalid argument")]
    assert not any(Failure(kind, message, ()).is_lost_peer() for kind, message in own)


def handle(rank, report):
    return RankHandle(rank, None, None, report=report, seconds=0.5)


def test_no_message_is_dropped_when_nothing_but_lost_peers_is_known():
    text = "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4006"
    handles = [handle(r, Failure("RuntimeError", text, ())) for r in range(2)]
    error = verdict.failure(handles)
    assert str(error).startswith(
        f"rank 0 of 2 lost the connection to a rank that had gone: RuntimeError: {text}")
    assert str(error).endswith("\nrank 1: lost the connection to a rank that had gone")
    assert error.failures[1] == f"RuntimeError: {text}"


def test_errors_without_words_in_circles_and_in_long_chains():
    class Speechless(Exception):
        def __str__(self):
            raise ValueError("no words")

    def speechless():
        raise Speechless

    def circle():
        one, two = ValueError("one"), KeyError("two")
        one.__cause__, two.__cause__ = two, one
        raise one

    def chain():
        error = None
        for i in range(400):
            new = ValueError(f"number {i}")
            new.__cause__, error = error, new
        raise error

    class Text(str):
        pass

    class Texts(Exception):
        def __str__(self):
            return Text("words")

    def texts():
        raise Texts

    def syntax():
        raise SyntaxError("words", (Text("file.py"), 1, 1, "?"))

    assert "raised Texts: words\n" in str(error_of(texts, ranks=1))
    assert "raised SyntaxError: words (file.py, line 1)\n" in str(error_of(syntax, ranks=1))
    assert "raised Speechless: (its message can't be shown: str() of it raised ValueError)" in str(
        error_of(speechless, ranks=1))
    text = str(error_of(circle, ranks=1))
    assert "raised ValueError: one" in text and "KeyError: 'two'\n  which led to" in text
    text = str(error_of(chain, ranks=1))
    assert "raised ValueError: number 399" in text and "ValueError: number 0\n" in text
    assert "... 394 errors more ..." in text and len(text.splitlines()) < 40


def test_a_very_long_message_is_cut():
    def work():
        raise RuntimeError("gloo/transport/" + "connection pair " * 100_000)

    text = str(error_of(work, ranks=1))
    assert len(text) < 12_000 and "and 1,590,015 characters more" in text


def test_exit_codes_of_every_kind():
    assert describe_exit(-int(signal.SIGRTMIN) - 3) == f"was killed by signal {signal.SIGRTMIN + 3}"
    assert describe_exit(-9) == "was killed by SIGKILL (often the system's memory ran out)"
    assert describe_exit(4) == "ended without returning (os._exit, exit code 4)"


def test_a_realtime_signal():
    number = signal.SIGRTMIN + 5
    assert f"rank 0 of 1 was killed by signal {number}" in str(
        error_of(lambda: os.kill(os.getpid(), number), ranks=1))


# many ranks

def test_ranks_in_a_row_are_named_by_the_first_and_the_last():
    assert rank_names([3]) == "rank 3" and rank_names([0, 2]) == "ranks 0, 2"
    assert rank_names(range(4)) == "ranks 0, 1, 2, 3"
    assert rank_names(r for r in range(64) if r != 5) == "ranks 0 to 4, 6 to 63"
    assert rank_names([0, 1, 3, 4, 5, 6, 7, 9]) == "ranks 0, 1, 3 to 7, 9"


def test_many_ranks_at_the_same_place_share_a_line():
    handles = [handle(r, Failure("ValueError", "odd", ()) if r % 2 else Value(b""))
               for r in range(64)]
    lines = verdict.whereabouts(handles).splitlines()
    assert len(lines) == 2 and lines[0].startswith("  ranks 0, 2, 4")
    assert lines[0].endswith("  finished after 0.5 s, and waits to be released")
    assert len(verdict.whereabouts(handles[:8]).splitlines()) == 8


# values that can't be opened

def test_a_value_that_lives_in_its_group():
    def work():
        return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))

    with pytest.raises(TypeError) as caught:
        launch(work, ranks=2)
    assert str(caught.value).startswith("launch: the value of rank 0 can't be opened outside of "
                                        "its rank: Default process group has not been initialized")
    assert str(caught.value).endswith("return what it holds, say a state_dict() or numbers")


class Slow:
    def __reduce__(self):
        return time.sleep, (3,)


def test_a_value_that_takes_for_ever_to_open(monkeypatch):
    monkeypatch.setattr(ship, "OPEN_LIMIT", 0.1)
    with pytest.raises(TimeoutError, match=r"value of rank 1 could not be opened within 0\.1 s"):
        ship.values([ship.dumps(3), ship.dumps(Slow())])


# what a rank does to itself

def test_a_rank_without_stdout_keeps_its_value():
    def work():
        sys.stdout = sys.stderr = None
        return dist.get_rank()

    assert launch(work, ranks=2) == [0, 1]


def test_a_child_that_comes_back_from_the_function_reports_nothing(capfd):
    def work(fails):
        child = os.fork()
        if child == 0 and fails:
            raise ValueError("in the child")
        if child:
            os.waitpid(child, 0)
        return "child" if child == 0 else dist.get_rank()

    assert launch(work, False, ranks=2) == [0, 1]
    assert launch(work, True, ranks=1) == [0]
    shown = capfd.readouterr().out
    assert "[rank 0] in a child process: ValueError: in the child" in shown
    assert 'raise ValueError("in the child")' in shown and "Traceback" not in shown


def ask_pdb():
    import pdb

    pdb.set_trace()


@pytest.mark.parametrize("ask", [lambda: input("how many? "), lambda: breakpoint(), ask_pdb])
def test_a_rank_has_no_keyboard(ask):
    assert "raised RuntimeError: a rank has no keyboard: ask before launch" in str(
        error_of(ask, ranks=2))


def test_input_from_a_file_of_the_learners():
    def work():
        sys.stdin = io.StringIO("seven\n")
        return input()

    assert launch(work, ranks=1) == ["seven"] and builtins.input.__module__ == "builtins"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
def test_memory_is_taken_from_ranks_first():
    def score():
        return int(open("/proc/self/oom_score_adj").read())

    mine = score()
    assert launch(score, ranks=2) == [min(mine + 300, 1000)] * 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
def test_threads_of_ranks_without_gpus_let_each_other_finish_their_turn():
    def policies():
        return {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}

    ours = os.SCHED_OTHER if torch.cuda.device_count() > 1 else os.SCHED_BATCH
    assert launch(policies, ranks=2) == [{ours}] * 2
    assert launch(policies, ranks=1) == [{os.SCHED_OTHER}]


def test_folders_of_workers_go_with_killed_ranks(monkeypatch, tmp_path):
    def load():
        data = torch.utils.data.DataLoader(torch.arange(1000.0), num_workers=2)
        for _ in data:
            made.append(1)
            time.sleep(60)

    made = []
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    error_of(load, ranks=2, timeout=2)
    assert not list(tmp_path.iterdir())


def test_workers_hand_tensors_on_in_the_folder_that_goes(monkeypatch, tmp_path):
    def where():
        import multiprocessing.util

        return multiprocessing.util.get_temp_dir()

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one, two = launch(where, ranks=2)
    assert one == two and os.path.dirname(one) == str(tmp_path) and not os.path.exists(one)


# around the launch

def test_a_screen_that_knows_only_ascii(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert launch(print, "caf\u00e9", ranks=1) == [None]
    sys.stdout.flush()
    assert raw.getvalue() == b"[rank 0] caf\\xe9\n"


def test_a_working_folder_that_was_deleted(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(RuntimeError) as caught:
        launch(dist.get_rank, ranks=1)
    assert str(caught.value) == ("launch: the working folder was deleted; os.chdir() to one that "
                                 "is there")


def test_an_interrupt_while_torch_is_imported_leaves_it_whole(tmp_path):
    script = write(tmp_path / "script.py", """
        import os, signal, sys
        from ranklab import launch

        def rank():
            return int(os.environ["RANK"])

        class Interrupt:  # at the import of a part of torch, in the middle
            def find_spec(self, name, path=None, target=None):
                if name == "torch.autograd":
                    sys.meta_path.remove(self)
                    os.kill(os.getpid(), signal.SIGINT)

        sys.meta_path.insert(0, Interrupt())
        try:
            launch(rank, ranks=2)
        except KeyboardInterrupt:
            print("interrupted", "torch" in sys.modules)
        print(launch(rank, ranks=2))
        """)
    process = python_run(script, tmp_path)
    out, errors = process.communicate(timeout=50)
    assert out == "interrupted True\n[0, 1]\n", errors


def _is_imported(name):
    return name in sys.modules


def test_what_is_preloaded_is_on_every_rank_and_what_cannot_be_is_left_out():
    rare = ("xml.sax.expatreader", "wsgiref.validate", "mailbox", "zipapp")
    name = next(each for each in rare if each not in sys.modules)  # other tests may want one
    assert launch(_is_imported, name, ranks=1) == [False]
    assert launch(_is_imported, name, ranks=2, preload=(name, "no_such_module")) == [True, True]
    assert name not in sys.modules


def test_a_server_that_does_not_answer_is_ended(monkeypatch):
    launch(int, ranks=1)
    server, = servers()
    server.suspend()
    monkeypatch.setattr(server_lines.Lines.wait_for, "__defaults__", (0.2,))
    with pytest.raises(server_lines.ServerStuck, match="has not answered for 0.2 s; it was ended"):
        launch(int, ranks=2)
    monkeypatch.undo()
    assert eventually(lambda: not server.is_running())
    assert launch(dist.get_rank, ranks=2) == [0, 1]


def test_the_promise_about_the_time_after_the_timeout():
    tail = worker_group.KILL_LIMIT + worker_group.DRAIN_LIMIT
    assert worker_group.STACK_LIMIT + tail < 5 and worker_group.RELEASE_LIMIT + tail < 5
    assert worker_group.LONGEST_GRACE + worker_group.CAUSE_LIMIT + tail <= 8


def test_what_the_engine_opens_is_not_reached_from_outside():
    """Of a launch's processes, none listens but on the loopback."""
    def listens():
        dist.barrier()
        mine = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"]
        dist.barrier()
        return mine

    assert {ip for seen in launch(listens, ranks=3) for ip in seen} <= {"127.0.0.1", "::1"}


WINDOWS = """
import importlib.abc, subprocess, sys, socket, signal, os, selectors, tempfile, mmap, pathlib
import multiprocessing, sysconfig, cloudpickle
sysconfig.get_paths()  # while it is on the system it is made for
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "termios", "pwd", "grp"):
            raise ImportError(f"No module named {name!r}")
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
for module, names in ((os, "fork memfd_create getppid"), (socket, "send_fds recv_fds"),
                      (signal, "SIGKILL SIGSTOP SIGUSR1 SIGCHLD setitimer")):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "win32"
import ranklab
try:
    ranklab.launch(print, ranks=2)
except RuntimeError as error:
    print(error)
"""


def test_windows_is_told_of_wsl_before_anything_is_missing():
    done = subprocess.run([sys.executable, "-c", WINDOWS], capture_output=True, text=True)
    assert done.stdout == ("launch needs Linux or macOS: on Windows, run this course inside WSL\n"
                           ), done.stderr
