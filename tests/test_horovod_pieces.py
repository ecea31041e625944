"""The pieces of ranklab.horovod, each for itself: settings, costs, compression, the recorder."""

import json
import math
import time

import pytest
import torch

import ranklab.horovod as hvd
from ranklab import launch
from ranklab.horovod.adaptive_sum import adasum_length
from ranklab.horovod.compression import ranks_until_infinite
from ranklab.horovod.cost import fused_time, overlapped_time
from ranklab.horovod.settings import Settings
from ranklab.horovod.trace import Recorder


def test_a_full_buffer_waits_for_backward_and_many_small_ones_for_latencies():
    sizes, wire = [1000] * 10, 2 * 3 / 4 * 1e-6  # seconds of one tensor on 4 ranks, at 1 GB/s
    one_by_one = overlapped_time(sizes, 0, 1.0, 4, 0, 1e-9)
    assert one_by_one == pytest.approx(1 + wire), "only the last one is not hidden"
    assert overlapped_time(sizes, 10_000, 1.0, 4, 0, 1e-9) == pytest.approx(1 + 10 * wire)
    latencies = fused_time(sizes, 2000, 4, 1e-3, 1e-9)
    assert overlapped_time(sizes, 2000, 0.0, 4, 1e-3, 1e-9) == pytest.approx(latencies)


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


@pytest.mark.parametrize("element, ranks", [(128, 512), (65504, 2), (1e6, 1), (1, math.inf)])
def test_a_sum_in_16_bits_overflows_or_stops(element, ranks):
    assert ranks_until_infinite(element) == ranks


@pytest.mark.parametrize("a, b, cosine, length", [
    (3, 4, 0, 5), (3, 3, 1, 3), (2, 2, -1, 0), (4, 4, 0.5, 3 * 3**0.5), (0, 7, 0.3, 7)])
def test_length_of_the_adasum_of_two(a, b, cosine, length):
    assert adasum_length(a, b, cosine) == pytest.approx(length)


# --- timeline -----------------------------------------------------------------------------------

def read(path):
    """{row's name: [(phase, start, end) in us, ...]} of a Chrome trace."""
    trace = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in trace if e["ph"] == "M"}
    rows = {name: [] for name in names.values()}
    for e in trace:
        if e["ph"] == "X":
            rows[names[e["pid"]]].append((e["name"], e["ts"], e["ts"] + e["dur"]))
    return rows


def test_a_trace_stays_whole_until_the_next_one_is(tmp_path):
    """Two notebooks may write the same file while one of them reads it."""
    path, recorder = tmp_path / "t.json", Recorder()
    hvd.timeline([("before", "ALLREDUCE", 0.0, 1.0)], path)
    recorder.start(str(path))
    recorder.note("after", "ALLREDUCE", time.perf_counter())
    assert set(read(path)) == {"before"}
    recorder.stop()
    assert set(read(path)) == {"after"} and list(tmp_path.iterdir()) == [path]


def record(folder):
    hvd.init(fusion_threshold=100)
    hvd.start_timeline(f"{folder}/{hvd.rank()}.json")
    for _ in range(2):
        hvd.grouped_allreduce([torch.ones(5), torch.ones(5), torch.ones(40)], name="g")
        hvd.allgather(torch.ones(2), name="rows")
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(1), name="after")
    hvd.shutdown()


def test_phases_are_nested_and_only_rank_0_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")  # Horovod's word for: start_timeline() begins
    monkeypatch.chdir(tmp_path)
    launch(record, str(tmp_path), ranks=2)
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]
    rows = read(tmp_path / "0.json")
    assert set(rows) == {"g.0", "g.1", "g.2", "rows"}
    copies = ["MEMCPY_IN_FUSION_BUFFER", "GLOO_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"]
    inside = {"g.0": copies, "g.1": copies, "g.2": ["GLOO_ALLREDUCE"], "rows": []}
    for name, events in rows.items():
        kind = "ALLGATHER" if name == "rows" else "ALLREDUCE"
        ready = ["rank 0 is ready", "rank 1 is ready"]
        seen = [phase for phase, *_ in events]
        assert sorted(seen) == sorted(2 * [f"NEGOTIATE_{kind}", *ready, kind, "QUEUE",
                                           *inside[name]]), name
        for _, start, end in (event for event in events if event[0] == kind):
            within = [e for e in events if start <= e[1] < e[2] <= end + 1e-3]
            assert [phase for phase, *_ in within] == [kind, "QUEUE", *inside[name]]
