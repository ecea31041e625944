"""Timeline: kinds, lanes and clock of what ranks do; the traces of all ranks in one file."""

import json
import threading
import time

import pytest
import torch
import torch.distributed as dist

from ranklab import device, launch
from ranklab.engine import RankError
from ranklab.meter import Event, Timeline, events_of, loading, mark, merged_trace

pytestmark = pytest.mark.usefixtures("one_thread")

LATE = 0.5  # seconds that the last rank comes too late: others may be late by a fifth of it
CLOCK = 0.002  # seconds: how far the profiler's clock may be off, on a busy machine


def of_kind(kind, events):
    return [event for event in events if event.kind == kind]


def seconds(events):
    return sum(event.end - event.start for event in events)


# --- one process --------------------------------------------------------------------------------

def test_ops_are_compute_and_nested_ones_are_inside():
    layer, x = torch.nn.Linear(64, 64), torch.randn(8, 64)
    with Timeline() as timeline:
        layer(x).sum().backward()
    names = [event.name for event in timeline.events]
    assert {event.kind for event in timeline.events} == {"compute"}
    assert {event.lane for event in timeline.events} == {"main"}
    assert names.count("aten::linear") == 1 and "aten::mm" in names  # backward has no linear
    assert "aten::addmm" not in names  # it is inside linear
    for one, after in zip(timeline.events, timeline.events[1:]):
        assert one.end <= after.start + 1e-6  # nothing nested is left on the one lane


def test_times_are_those_of_the_unix_clock():
    with Timeline() as timeline:
        before = time.time()
        with mark("compute"):
            time.sleep(0.01)
        after = time.time()
    event, = timeline.events
    assert before - CLOCK <= event.start < event.end <= after + CLOCK
    assert event.end - event.start >= 0.01 - CLOCK


def test_a_loader_is_marked_by_hand_or_by_torch_itself():
    data = torch.utils.data.TensorDataset(torch.zeros(8, 4))
    with Timeline() as timeline:
        with loading():
            torch.zeros(100).sum()  # the loader's own ops are no compute
        for x, in torch.utils.data.DataLoader(data, batch_size=4):
            x.exp()
    kinds = [(event.kind, event.name) for event in timeline.events if event.name != "aten::item"]
    assert ("loader", "ranklab.loader") in kinds and ("compute", "aten::sum") not in kinds
    batches = [name for kind, name in kinds if kind == "loader"][1:]
    assert len(batches) == 3  # two, and the one that finds the end
    assert [name for kind, name in kinds if kind == "compute"].count("aten::exp") == 2


def test_other_threads_are_seen_and_an_unknown_kind_is_refused():
    def talk():
        with mark("communication"):
            time.sleep(0.01)

    with Timeline() as timeline:
        thread = threading.Thread(target=talk)
        thread.start()
        thread.join()
    event, = of_kind("communication", timeline.events)
    assert event.lane == "thread 1"
    # The main thread ran nothing, so nothing says that it waited.
    assert not of_kind("wait", timeline.events)
    with pytest.raises(ValueError, match="kind='comm' is not one of compute, communication, load"):
        mark("comm")


def test_a_compiled_function_is_compute():
    work = torch.compile(lambda x: (x * 2).relu() @ x, backend="aot_eager")
    x = torch.ones(16, 16)
    work(x)
    with Timeline() as timeline:
        work(x)
    assert seconds(of_kind("compute", timeline.events)) > 0


# --- ranks --------------------------------------------------------------------------------------

def _late_rank():
    """All ranks start together; before the third all-reduce the last rank is late."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = torch.ones(1000, device=device())
    dist.all_reduce(x)  # opens connections
    with Timeline() as timeline:
        for step in range(4):
            x.mul_(0.5)
            if step == 2 and rank == last:
                with mark("compute"):
                    time.sleep(LATE)
            dist.all_reduce(x)
        x.mul_(0.5)
    return timeline


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_ranks_share_a_clock_and_waiting_is_seen(ranks, tmp_path):
    timelines = launch(_late_rank, ranks=ranks)
    sums = [of_kind("communication", timeline.events) for timeline in timelines]
    assert [len(each) for each in sums] == [4] * ranks
    assert all(event.lane.startswith("gloo ") for each in sums for event in each)
    for of_ranks in zip(*sums):  # nobody can have the sum before the last rank brought its share
        assert min(e.end for e in of_ranks) >= max(e.start for e in of_ranks) - CLOCK
    for timeline in timelines[:-1]:
        assert seconds(of_kind("wait", timeline.events)) > 0.8 * LATE
    assert ranks == 1 or max(e.end - e.start for e in sums[0]) > 0.8 * LATE
    _is_one_file_of(timelines, tmp_path / "all.json")


def _is_one_file_of(timelines, path):
    merged_trace(timelines, path)
    events = json.loads(path.read_text())["traceEvents"]
    ranks = range(len(timelines))
    labels = {(e["name"], e["pid"]): e["args"] for e in events if e["ph"] == "M" and not e["tid"]}
    assert [labels["process_sort_index", r]["sort_index"] for r in ranks] == list(ranks)
    assert [labels["process_name", r]["name"].split(",")[0] for r in ranks] == [
        f"rank {r}" for r in ranks]
    for rank, timeline in enumerate(timelines):
        threads = {e["tid"]: e["args"]["name"] for e in events
                   if e["name"] == "thread_name" and e["pid"] == rank}
        assert threads[0] == "main" and set(threads.values()) >= {e.lane for e in timeline.events}
        mine = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
        assert [e["name"] for e in mine].count("gloo:all_reduce") == 4
        assert min(e["ts"] for e in mine) >= 0
        first = next(e for e in mine if e["name"] == "gloo:all_reduce")
        assert threads[first["tid"]].startswith("gloo ")
    # The distance between two ranks is the one of their clocks.
    starts = [min(e["ts"] for e in events if e["ph"] == "X" and e["pid"] == r) for r in ranks]
    assert min(starts) == pytest.approx(0, abs=1)


def _ddp_step():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).to(device())
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.2)
    x = torch.ones(8, 256, device=device())
    for _ in range(2):
        model(x).sum().backward()
    with Timeline() as timeline:
        model(x).sum().backward()
    return timeline.events


def test_the_gradients_of_ddp_travel_on_gloos_threads():
    for events in launch(_ddp_step, ranks=2):
        sums = [e for e in events if e.name == "gloo:all_reduce"]
        assert len(sums) == 4 and {e.kind for e in sums} == {"communication"}
        assert {e.lane for e in sums} <= {"gloo 1", "gloo 2"}
        assert not [e for e in events if "DistributedDataParallel" in e.name or "c10d" in e.name]


# --- a GPU's trace, made by hand ----------------------------------------------------------------

def record(category, name, ts, dur, pid=77, tid=77, **args):
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur,
            "args": args}


def gpu_trace(rank):
    """Backward on stream 7 of GPU 7 with NCCL on stream 20, as torch's profiler would write it."""
    gpu = {"pid": 7, "device": 7}
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    return {
        "baseTimeNanoseconds": 1_000_000_000_000,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2},
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "thread_name", "pid": 77, "tid": 78,
             "args": {"name": "thread 78 (pt_autograd_0)"}},
            record("user_annotation", "enumerate(DataLoader)#_Iter.__next__", 0, 50),
            record("cpu_op", "aten::mm", 60, 20),
            record("cuda_runtime", "cudaLaunchKernel", 65, 5, correlation=1),
            {"ph": "s", "id": 1, "pid": 77, "tid": 77, "ts": 65, "cat": "ac2g", "name": "ac2g"},
            {"ph": "f", "id": 1, "pid": 7, "tid": 7, "ts": 80, "cat": "ac2g", "name": "ac2g"},
            record("user_annotation", "nccl:all_reduce", 70, 3, tid=78),
            record("cpu_op", "aten::mm", 70, 20, tid=78),
            record("kernel", "ampere_sgemm_128x64_nn", 80, 100, tid=7, stream=7, **gpu),
            record("kernel", "elementwise_kernel", 179, 11, tid=7, stream=7, **gpu),
            record("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 70, 9, tid=7, stream=7, **gpu),
            record("kernel", nccl, 120, 130, tid=20, stream=20, **gpu),
            record("gpu_user_annotation", "nccl:all_reduce", 120, 130, tid=20, stream=20, **gpu),
            record("cuda_runtime", "cudaDeviceSynchronize", 100, 155),
            {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans",
             "tid": "PyTorch Profiler", "ts": 0, "dur": 300, "args": {}},
        ],
    }


def test_on_a_gpu_kernels_count_and_not_their_launches():
    seen = [(e.kind, e.lane, round((e.start - 1000) * 1e6), round((e.end - 1000) * 1e6))
            for e in events_of(gpu_trace(0))]
    assert seen == [
        ("loader", "main", 0, 50),
        ("compute", "stream 7", 80, 180),
        ("wait", "main", 100, 255),
        ("communication", "stream 20", 120, 250),
        ("compute", "stream 7", 179, 190),  # a stream may start a kernel before the last one ends
    ]


def test_ranks_on_two_machines_may_have_the_same_numbers(tmp_path):
    later = gpu_trace(1)
    later["baseTimeNanoseconds"] += 1_000_000  # this machine wrote 1 ms later
    merged_trace([gpu_trace(0), later], tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert [e["pid"] for e in kernels] == [0, 0, 0, 1, 1, 1]
    assert kernels[3]["ts"] - kernels[0]["ts"] == pytest.approx(1000)
    arrows = [(e["ph"], e["pid"], e["id"]) for e in events if "id" in e]
    assert arrows[0][2] == arrows[1][2] != arrows[2][2] == arrows[3][2]
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1]
    assert threads == ["main", "backward 1", "stream 7", "stream 20"]
    assert not [e for e in events if e["pid"] == "Spans"]
    with pytest.raises(ValueError, match=r"but these are of ranks \[1, 1\]"):
        merged_trace([later, later], tmp_path / "twice.json")


def _unknown_kind():
    with Timeline(), mark("idle"):
        pass


def test_a_wrong_kind_on_a_rank_is_a_sentence():
    with pytest.raises(RankError, match="kind='idle' is not one of compute"):
        launch(_unknown_kind, ranks=2)


def test_an_empty_block_has_no_events():
    with Timeline() as timeline:
        pass
    assert timeline.events == [] and isinstance(Event("x", "wait", 0, 1, "main"), tuple)
