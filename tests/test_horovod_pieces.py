"""The pieces of ranklab.horovod, each for itself: fusion, settings, Adasum, timeline."""

import json
import math
import time

import pytest
import torch

from ranklab import launch
from ranklab.flat import unpack
from ranklab.horovod import FusionBuffer, timeline
from ranklab.horovod.adaptive_sum import adasum_length
from ranklab.horovod.compression import ranks_until_infinite
from ranklab.horovod.coordinator import Coordinator
from ranklab.horovod.cost import fused_time, overlapped_time
from ranklab.horovod.requests import Request
from ranklab.horovod.settings import Settings
from ranklab.horovod.trace import Recorder

pytestmark = pytest.mark.usefixtures("one_thread")


# --- fusion -------------------------------------------------------------------------------------

def test_pack_and_unpack_are_inverse_and_keep_their_memory():
    buffer = FusionBuffer()
    tensors = [torch.randn(2, 3), torch.randn(()), torch.randn(4, 2).t(), torch.empty(0)]
    flat = buffer.pack(tensors)
    assert torch.equal(flat, torch.cat([t.flatten() for t in tensors]))
    back = [torch.zeros_like(t) for t in tensors]
    unpack(flat, back)
    assert all(torch.equal(a, b) for a, b in zip(tensors, back))
    assert buffer.pack(tensors[:2]).data_ptr() == flat.data_ptr()
    assert buffer.pack([torch.ones(3, dtype=torch.int16)]).dtype == torch.int16


def test_a_full_buffer_waits_for_backward_and_many_small_ones_for_latencies():
    sizes, wire = [1000] * 10, 2 * 3 / 4 * 1e-6  # seconds of one tensor on 4 ranks, at 1 GB/s
    one_by_one = overlapped_time(sizes, 0, 1.0, 4, 0, 1e-9)
    assert one_by_one == pytest.approx(1 + wire), "only the last one is not hidden"
    assert overlapped_time(sizes, 10_000, 1.0, 4, 0, 1e-9) == pytest.approx(1 + 10 * wire)
    latencies = fused_time(sizes, 2000, 4, 1e-3, 1e-9)
    assert overlapped_time(sizes, 2000, 0.0, 4, 1e-3, 1e-9) == pytest.approx(latencies)


def test_what_fusion_is_worth():
    alone = fused_time([1000] * 100, 0, 8, alpha=1e-5, beta=1e-9)
    fused = fused_time([1000] * 100, 10**6, 8, alpha=1e-5, beta=1e-9)
    assert alone - fused == pytest.approx(99 * 14 * 1e-5)


# --- negotiation --------------------------------------------------------------------------------

def request(name="w", kind="allreduce", **about):
    return Request(name, kind, (2,), torch.float32, op="Sum")._replace(**about)


def test_the_coordinator_answers_when_all_have_asked():
    one = Coordinator(3, Settings(), Recorder())
    one.hear(1, [request("a"), request("b")])
    one.hear(0, [request("b")])
    assert one.answer() == []
    one.hear(2, [request("b"), request("a")])
    assert [r.request.name for r in one.answer()] == ["b"]
    one.hear(0, [request("a")])
    assert [r.request.name for r in one.answer()] == ["a"]
    assert not one.table and not one.heard


# --- settings -----------------------------------------------------------------------------------

def test_settings_come_from_arguments_then_from_the_environment(monkeypatch):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1000")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2.5")
    assert Settings.from_environment() == Settings(1000, 2.5)
    assert Settings.from_environment(cycle_time_ms=0) == Settings(1000, 0)
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "fast")
    with pytest.raises(ValueError, match="HOROVOD_CYCLE_TIME=fast is no number"):
        Settings.from_environment()
    with pytest.raises(ValueError, match="fusion_threshold=-1 must not be negative"):
        Settings(fusion_threshold=-1)
    with pytest.raises(ValueError, match="stall_check=10.0 must be .* stall_shutdown=5"):
        Settings(stall_shutdown=5)


# --- compression --------------------------------------------------------------------------------

@pytest.mark.parametrize("element, ranks", [(128, 512), (-128, 512), (65504, 2), (1e6, 1),
                                            (1, math.inf), (0, math.inf)])
def test_a_sum_in_16_bits_overflows_or_stops(element, ranks):
    assert ranks_until_infinite(element) == ranks


# --- Adasum -------------------------------------------------------------------------------------

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
    for event in trace:
        if event["ph"] == "X":
            rows[names[event["pid"]]].append((event["name"], event["ts"],
                                              event["ts"] + event["dur"]))
    return rows


def test_a_trace_stays_whole_until_the_next_one_is(tmp_path):
    """Two notebooks may write the same file while one of them reads it."""
    path, recorder = tmp_path / "t.json", Recorder()
    timeline([("before", "ALLREDUCE", 0.0, 1.0)], path)
    recorder.start(str(path))
    recorder.note("after", "ALLREDUCE", time.perf_counter())
    assert set(read(path)) == {"before"}
    recorder.stop()
    assert set(read(path)) == {"after"} and list(tmp_path.iterdir()) == [path]


def test_phases_are_nested_and_only_rank_0_writes(tmp_path):
    def record(folder):
        import ranklab.horovod as hvd

        hvd.init(fusion_threshold=100)
        hvd.start_timeline(f"{folder}/{hvd.rank()}.json")
        for _ in range(2):
            hvd.grouped_allreduce([torch.ones(5), torch.ones(5), torch.ones(40)], name="g")
            hvd.allgather(torch.ones(2), name="rows")
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(1), name="after")
        hvd.start_timeline(f"{folder}/again.json", mark_cycles=True)
        hvd.allreduce(torch.ones(1), name="again")
        hvd.shutdown()

    launch(record, str(tmp_path), ranks=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "again.json"]
    assert set(read(tmp_path / "again.json")) == {"again", "cycles"}
    rows = read(tmp_path / "0.json")
    assert set(rows) == {"g.0", "g.1", "g.2", "rows"}
    for name, events in rows.items():
        kind = "ALLGATHER" if name == "rows" else "ALLREDUCE"
        whole = [e for e in events if e[0] == kind]
        agreeing = [e for e in events if e[0] == f"NEGOTIATE_{kind}"]
        assert len(whole) == len(agreeing) == 2
        for (_, start, end), (_, since, until) in zip(whole, agreeing):
            assert since <= until <= start + 1 <= end + 1
            inside = [e for e in events if e[0] not in (kind, f"NEGOTIATE_{kind}")
                      and start <= e[1] <= end]
            assert all(e[2] <= end + 1e-3 for e in inside)
            phases = ["QUEUE"]
            if name in ("g.0", "g.1"):  # these two are fused, 40 floats do not fit in
                phases += ["MEMCPY_IN_FUSION_BUFFER", "GLOO_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"]
            elif name == "g.2":
                phases += ["GLOO_ALLREDUCE"]
            assert [e[0] for e in inside] == phases
        assert sum(e[0] in ("rank 0 is ready", "rank 1 is ready") for e in events) == 4
