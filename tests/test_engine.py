"""launch: values, arguments, environment, output, bad input, and nothing that grows or leaks."""

import io
import os
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from engine_tools import eventually, python_run, ranks_alive, write

from ranklab import RankError, device, launch
from ranklab.engine import worker_group

pytestmark = pytest.mark.timeout(60)


# values

@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_values_come_from_every_rank_in_order(ranks):
    def work(offset):
        total = torch.ones(3) * dist.get_rank()
        dist.all_reduce(total)
        return dist.get_rank() + offset, dist.get_world_size(), total.tolist()

    total = float(sum(range(ranks)))
    assert launch(work, 10, ranks=ranks) == [(10 + r, ranks, [total] * 3) for r in range(ranks)]


def test_a_hook_from_the_environment_wraps_the_function_of_each_rank(monkeypatch):
    monkeypatch.setenv("RANKLAB_RANK_HOOK", "engine_tools:with_group")
    assert launch(dist.get_rank, ranks=2) == [(True, 0), (True, 1)]
    monkeypatch.setenv("RANKLAB_RANK_HOOK", "engine_tools:nothing_here")
    with pytest.raises(RankError, match="nothing_here"):
        launch(dist.get_rank, ranks=2)


def test_four_ranks_where_there_are_no_gpus():
    if torch.cuda.device_count() > 1:
        assert len(launch(dist.get_rank)) == torch.cuda.device_count()
    else:
        assert launch(dist.get_rank) == [0, 1, 2, 3]


def test_each_launch_has_fresh_ranks():
    def leave_a_trace():
        seen = hasattr(torch, "trace_of_a_launch")
        torch.trace_of_a_launch = True
        return seen, os.getpid()

    first, second = launch(leave_a_trace, ranks=2), launch(leave_a_trace, ranks=2)
    assert [seen for seen, _ in first + second] == [False] * 4
    assert len({pid for _, pid in first + second}) == 4


def test_a_rank_is_on_the_cpu_and_has_one_thread(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def where():
        return str(device()), torch.get_num_threads()

    if torch.cuda.device_count() < 2:
        assert launch(where, ranks=2) == [("cpu", 1)] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert [threads for _, threads in launch(where, ranks=2)] == [2, 2]


def test_two_nodes():
    names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")

    def layout():
        return [int(os.environ[name]) for name in names]

    assert launch(layout, ranks=4, nodes=2) == [
        [0, 0, 0, 4, 2], [1, 0, 1, 4, 2], [2, 1, 0, 4, 2], [3, 1, 1, 4, 2]]
    assert launch(layout, ranks=2, nodes=2) == [[0, 0, 0, 2, 1], [1, 1, 0, 2, 1]]


def test_random_numbers_differ_between_ranks_but_torch_starts_alike_as_under_torchrun():
    def draw():
        import random

        import numpy

        return random.random(), numpy.random.rand(), torch.rand(1).item()

    drawn = launch(draw, ranks=2) + launch(draw, ranks=2)
    pythons, numpys, of_torch = (set(column) for column in zip(*drawn, strict=True))
    assert len(pythons) == 4 and len(numpys) == 4 and len(of_torch) == 1


def test_a_rank_may_leave_its_group_and_join_again():
    def join_again():
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert launch(join_again, ranks=2, timeout=20) == [2.0, 2.0]


# what travels

class Point:
    def __init__(self, x):
        self.x = x


def test_functions_of_every_kind():
    step = 3

    class Counter:
        def __init__(self, start):
            self.start = start

        def __call__(self, more):
            return self.start + more + step

    assert launch(lambda x: x + step, 1, ranks=2) == [4, 4]
    assert launch(Counter(5), 1, ranks=1) == [9]
    assert launch(Counter(5).__call__, 1, ranks=1) == [9]
    assert [p.x for p in launch(Point, 7, ranks=2)] == [7, 7]
    assert all(type(c) is Counter for c in launch(Counter, 1, ranks=2))
    assert launch(dist.get_rank, ranks=2) == [0, 1]
    assert launch(dist.barrier, ranks=2) == [None, None]


def tensors():
    """One of each kind that a lab sends."""
    big = torch.arange(12.0).reshape(3, 4)
    return {
        "row": big[1],
        "column": big[:, 1],
        "transposed": big.T,
        "expanded": torch.ones(1).expand(5),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "whole": torch.tensor([[1, 2]], dtype=torch.int64),
        "flags": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]).conj(),
        "number": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "sparse": torch.eye(3).to_sparse(),
        "one of a column": torch.arange(4).bfloat16().view(2, 2)[:1, 1],
    }


def test_tensors_travel_there_and_back():
    sent = tensors()
    for seen in launch(lambda got: got, sent, ranks=2):
        for name, tensor in sent.items():
            assert seen[name].dtype == tensor.dtype and seen[name].shape == tensor.shape, name
            assert torch.equal(seen[name].to_dense(), tensor.to_dense()), name
        seen["row"][0] = 1.0  # may be changed
    assert sent["row"][0] == 4.0


def test_gradients_and_modules_travel():
    def work(model):
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        return model, loss, model.weight.grad

    model, loss, grad = launch(work, torch.nn.Linear(3, 4), ranks=1)[0]
    assert isinstance(model.weight, torch.nn.Parameter) and model.weight.requires_grad
    assert grad.tolist() == [[2.0] * 3] * 4
    assert not loss.requires_grad  # its graph stays on the rank


def test_a_view_does_not_bring_its_whole_storage():
    from ranklab.engine import ship

    whole = torch.zeros(1_000_000)
    assert len(ship.dumps(whole[:10])) < 1000
    assert torch.equal(ship.loads(ship.dumps(whole[:10])), whole[:10])


def test_a_result_of_200_megabytes():
    def big():
        return torch.full((50_000_000,), float(dist.get_rank()))

    values = launch(big, ranks=2)
    assert [v.numel() for v in values] == [50_000_000] * 2
    assert [(v.min().item(), v.max().item()) for v in values] == [(0, 0), (1, 1)]


def test_a_large_argument_for_16_ranks_is_held_once():
    def private_memory(x):
        grown = psutil.Process().memory_full_info().uss  # not what ranks share
        return x.sum().item(), grown

    small = launch(private_memory, torch.ones(1), ranks=16)
    large = launch(private_memory, torch.ones(8_000_000), ranks=16)  # 32 MB
    for (_, before), (total, after) in zip(small, large, strict=True):
        assert total == 8_000_000
        assert after - before < 56e6  # its own tensor, and never a second copy for long


def test_what_cannot_be_sent_is_named():
    with pytest.raises(TypeError, match="launch: argument 2 can't be sent to the ranks: .*lock"):
        launch(print, 1, threading.Lock(), ranks=2)
    lock = threading.Lock()
    with pytest.raises(TypeError, match="launch: the function can't be sent to the ranks: .*lock"):
        launch(lambda: lock, ranks=2)


def test_a_value_that_cannot_be_sent_is_named():
    with pytest.raises(RuntimeError) as caught:
        launch(threading.Lock, ranks=2)
    assert "rank 0 of 2 raised TypeError: the returned value, a lock, can't be sent back" in str(
        caught.value)
    assert "rank 1: the same" in str(caught.value)


# environment

def test_the_environment_of_the_moment(monkeypatch):
    def seen():
        return [os.environ.get(name) for name in ("SET_LATER", "HOME_OF_TESTS")]

    monkeypatch.setenv("HOME_OF_TESTS", "here")
    assert launch(seen, ranks=2) == [[None, "here"]] * 2
    monkeypatch.setenv("SET_LATER", "now")
    monkeypatch.delenv("HOME_OF_TESTS")
    assert launch(seen, ranks=2) == [["now", None]] * 2


def test_ranks_without_gpus_of_their_own_see_none():
    """fully_shard would take the only GPU of a machine, whatever the ranks run on."""
    seen = launch(lambda: (device().type, os.environ.get("CUDA_VISIBLE_DEVICES")), ranks=2)
    assert all(gpus == "" for kind, gpus in seen if kind == "cpu")


def test_torchs_debug_level_may_be_set_later(monkeypatch):
    def level():
        return dist.get_debug_level().name

    assert launch(level, ranks=1) == ["OFF"]
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert launch(level, ranks=1) == ["DETAIL"]


def test_the_current_directory_and_sys_path(tmp_path, monkeypatch):
    (tmp_path / "beside_the_notebook.py").write_text("ANSWER = 42\n")
    (tmp_path / "types.py").write_text("raise ImportError('not the types of Python')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, ""])

    def work():
        import beside_the_notebook

        return os.getcwd(), beside_the_notebook.ANSWER

    assert launch(work, ranks=2) == [(str(tmp_path), 42)] * 2


def test_changes_on_a_rank_stay_there():
    def change(values):
        os.environ["CHANGED"] = "1"
        os.chdir("/")
        values.append(1)

    values, here = [], os.getcwd()
    launch(change, values, ranks=2)
    assert (values, os.getcwd(), "CHANGED" in os.environ) == ([], here, False)


# output

def test_output_is_in_the_order_of_the_ranks(capfd):
    def talk():
        for i in range(10_000):
            print(i, dist.get_rank())

    launch(talk, ranks=4)
    lines = capfd.readouterr().out.splitlines()
    assert lines == [f"[rank {r}] {i} {r}" for r in range(4) for i in range(10_000)]


def test_output_of_every_kind(capfd):
    def talk():
        import atexit

        if dist.get_rank() == 0:
            print("no newline", end="")
        if dist.get_rank() == 1:
            print("one\n\nthree")
            print("to stderr", file=sys.stderr)
            os.system("echo from a shell")
            atexit.register(print, "after the function")
        if dist.get_rank() == 2:
            os.write(1, b"\xff not UTF-8\r\n")
            print("\u00e9t\u00e9 \u2603")

    launch(talk, ranks=3)
    assert capfd.readouterr().out.splitlines() == [
        "[rank 0] no newline",
        "[rank 1] one", "[rank 1] ", "[rank 1] three", "[rank 1] to stderr",
        "[rank 1] from a shell", "[rank 1] after the function",
        "[rank 2] \ufffd not UTF-8", "[rank 2] \u00e9t\u00e9 \u2603"]


def test_names_of_ranks_are_aligned(capfd):
    launch(print, "hello", ranks=11)
    lines = capfd.readouterr().out.splitlines()
    assert lines == [f"[rank {r:2}] hello" for r in range(11)]


class Screen(io.StringIO):
    """A terminal: a carriage return goes back to the start of the line. `on_text` sees it all."""

    def __init__(self, on_text=lambda text: None):
        super().__init__()
        self.on_text = on_text

    def write(self, text):
        super().write(text)
        self.on_text(self.getvalue())
        return len(text)

    def lines(self):
        lines = []
        for line in self.getvalue().split("\n"):
            cells = []
            for part in line.split("\r"):
                cells[: len(part)] = part
            lines.append("".join(cells).rstrip())
        return lines


def test_stream_shows_lines_as_they_come(tmp_path, monkeypatch):
    answer = tmp_path / "seen"

    def on_text(text):
        if "are you there" in text:
            answer.touch()

    screen = Screen(on_text)
    monkeypatch.setattr(sys, "stdout", screen)

    def ask():
        print("are you there?")
        while not answer.exists():
            time.sleep(0.01)
        print("good")

    launch(ask, ranks=1, timeout=20, stream=True)
    assert screen.lines() == ["[rank 0] are you there?", "[rank 0] good", ""]


def test_stream_with_a_progress_bar(tmp_path, monkeypatch):
    frames = []
    screen = Screen(lambda text: frames.append(text.rpartition("\r")[2]))
    monkeypatch.setattr(sys, "stdout", screen)

    def train():
        from tqdm import tqdm

        for step in tqdm(range(50), ncols=60, mininterval=0, miniters=1):
            if step == 25 and dist.get_rank() == 1:
                print("halfway")
            time.sleep(0.002)

    launch(train, ranks=2, timeout=20, stream=True)
    bars = [frame for frame in frames if "%|" in frame and "\n" not in frame]
    assert len(bars) > 5 and all(bar.startswith("[rank 0]") for bar in bars)
    lines = screen.lines()
    # What rank 1 printed is whole, and the bar of rank 0 is one line at the end.
    assert any(line.startswith("[rank 1]") and line.endswith("halfway") for line in lines), lines
    assert [line[:13] for line in lines if "[rank 0]" in line] == ["[rank 0] 100%"], lines
    assert not any("[rank" in line[1:] for line in lines), lines


def test_watch_is_told_where_ranks_are(monkeypatch):
    monkeypatch.setattr(worker_group, "WATCH_INTERVAL", 0.5)
    told = []

    def compute():
        end = time.monotonic() + 2
        while time.monotonic() < end:
            pass

    launch(compute, ranks=2, timeout=20, watch=told.append)
    assert told and "rank 0  is at" in told[0] and "in compute" in told[0]


def test_a_bar_without_stream_leaves_its_last_state(capfd):
    def train():
        from tqdm import tqdm

        for _ in tqdm(range(5), ncols=60):
            pass

    launch(train, ranks=2)
    lines = capfd.readouterr().out.splitlines()
    assert [line[:13] for line in lines] == ["[rank 0] 100%", "[rank 1] 100%"]


# bad input

@pytest.mark.parametrize(("arguments", "sentence"), [
    ({"fn": 3}, "its first argument is the function to run, got 3"),
    ({"ranks": 0}, "ranks must be a whole number above 0, got 0"),
    ({"ranks": 2.0}, "ranks must be a whole number above 0, got 2.0"),
    ({"ranks": True}, "ranks must be a whole number above 0, got True"),
    ({"nodes": -1}, "nodes must be a whole number above 0, got -1"),
    ({"ranks": 4, "nodes": 3}, "nodes=3 must divide ranks=4"),
    ({"timeout": 0}, "timeout must be a number of seconds, above 0 .*, got 0"),
    ({"timeout": "60"}, "timeout must be a number of seconds, above 0 .*, got '60'"),
    ({"timeout": None}, "timeout must be a number of seconds, above 0 .*, got None"),
    ({"timeout": float("inf")}, "timeout must be .* at most 1,728,000, got inf"),
    ({"timeout": float("nan")}, "timeout must be .* got nan"),
])
def test_bad_input_is_a_sentence(arguments, sentence):
    with pytest.raises((TypeError, ValueError), match=f"^launch: {sentence}"):
        launch(arguments.pop("fn", print), **arguments)


def test_windows_is_told_of_wsl(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(RuntimeError, match="on Windows, run this course inside WSL"):
        launch(print, ranks=2)


def test_launch_inside_launch_is_a_sentence():
    with pytest.raises(RuntimeError, match="launch was called inside a launch: a rank can't start"):
        launch(lambda: launch(print), ranks=2)


# several at once

def test_two_launches_from_threads(capfd):
    def work(name):
        gathered = [None] * 3
        dist.all_gather_object(gathered, (name, dist.get_rank()))
        print(name)
        return gathered

    values = {}
    threads = [threading.Thread(target=lambda n=n: values.update({n: launch(work, n, ranks=3)}))
               for n in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == {n: [[(n, r) for r in range(3)]] * 3 for n in ("a", "b")}
    assert sorted(capfd.readouterr().out.split()) == sorted(
        ["[rank", "0]", "[rank", "1]", "[rank", "2]"] * 2 + ["a"] * 3 + ["b"] * 3)


# nothing grows

def boom():
    raise ValueError("on purpose")


@pytest.mark.timeout(120)
def test_fifty_launches_leak_no_descriptor_thread_or_process():
    def state():
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(ranks_alive())

    def some(times):
        for i in range(times):
            launch(dist.get_rank, ranks=1)
            if i % 10 == 0:
                with pytest.raises(RuntimeError):
                    launch(boom, ranks=2)
                with pytest.raises(TimeoutError):
                    launch(time.sleep, 60, ranks=2, timeout=0.2)

    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux")
    some(2)
    before = state()
    some(50)
    assert eventually(lambda: state() == before), (before, state())


def test_memory_does_not_grow(tmp_path):
    """In a process of its own: in one that has run other tests, what is free lies scattered."""
    process = python_run(write(tmp_path / "script.py", """
        import psutil, torch
        from ranklab import launch

        def big():
            return torch.ones(5_000_000)  # 20 MB

        if __name__ == "__main__":
            for launches in (3, 8):
                before = psutil.Process().memory_info().rss
                for _ in range(launches):
                    launch(big, ranks=2)
            print(psutil.Process().memory_info().rss - before)
        """), tmp_path)
    grown, errors = process.communicate(timeout=50)
    assert int(grown) < 100e6, errors  # of 320 MB that came


# ranks that start processes

def test_workers_of_a_data_loader():
    def load():
        data = torch.utils.data.TensorDataset(torch.arange(8.0))
        loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2)
        return [batch[0].sum().item() for batch in loader]

    assert launch(load, ranks=2) == [[6.0, 22.0]] * 2
    assert eventually(lambda: not ranks_alive())


def test_workers_know_what_a_cell_defined():
    """They are forked: also under Python 3.14, which elsewhere starts fresh processes."""
    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, place):
            return place * place

    def load():
        loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=1)
        return [batch.tolist() for batch in loader]

    assert launch(load, ranks=2) == [[[0, 1], [4, 9]]] * 2


def test_a_rank_may_choose_how_its_processes_start():
    def choose():
        import multiprocessing

        multiprocessing.set_start_method("spawn")
        return multiprocessing.get_start_method()

    assert launch(choose, ranks=1) == ["spawn"]


def test_a_process_that_a_rank_left_running_goes_too(capfd):
    def leave_one():
        import subprocess

        return subprocess.Popen(["sh", "-c", "while :; do echo still here; done"]).pid

    pids = launch(leave_one, ranks=2)
    assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert "[rank 0] still here" in capfd.readouterr().out
