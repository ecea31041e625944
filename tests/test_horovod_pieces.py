"""The pieces of ranklab.horovod, each for itself: fusion, negotiation, cache, Adasum, timeline."""

import json
import math
import random
import time

import pytest
import torch
import torch.distributed as dist

from ranklab import launch
from ranklab.flat import unpack
from ranklab.horovod import (
    Compression, FusionBuffer, adasum, compress_fp16, fuse_tensors, negotiate, timeline,
)
from ranklab.horovod.adaptive_sum import adasum_length
from ranklab.horovod.cache import ResponseCache, from_bits, to_bits
from ranklab.horovod.compression import ranks_until_infinite
from ranklab.horovod.coordinator import Coordinator
from ranklab.horovod.cost import fused_time, negotiation_bytes, overlapped_time
from ranklab.horovod.requests import JOIN, Request, Response
from ranklab.horovod.settings import Settings
from ranklab.horovod.trace import Recorder
from ranklab.meter import Traffic

pytestmark = pytest.mark.usefixtures("one_thread")


def of_bytes(*sizes, dtype=torch.uint8):
    return [torch.zeros(n // dtype.itemsize, dtype=dtype) for n in sizes]


# --- fusion -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes, threshold, groups", [
    ([], 10, []), ([4, 4, 4], 8, [[0, 1], [2]]), ([4, 4, 4], 7, [[0], [1], [2]]),
    ([100, 1, 1], 8, [[0], [1, 2]]), ([1, 100, 1], 8, [[0], [1], [2]]),
    ([3, 3, 3], 0, [[0], [1], [2]]), ([0, 5, 0], 5, [[0, 1, 2]]),
])
def test_groups_are_filled_in_order(sizes, threshold, groups):
    assert fuse_tensors(of_bytes(*sizes), threshold) == groups


def test_groups_hold_one_dtype_and_look_past_others():
    half, single = of_bytes(4, 4, 4, dtype=torch.float16), of_bytes(4, 4, 4, dtype=torch.float32)
    mixed = [half[0], single[0], half[1], single[1], half[2], single[2]]
    assert fuse_tensors(mixed, 100) == [[0, 2, 4], [1, 3, 5]]
    assert fuse_tensors(mixed, 8) == [[0, 2], [1, 3], [4], [5]]
    with pytest.raises(ValueError, match="threshold=-1 must not be negative"):
        fuse_tensors(mixed, -1)


@pytest.mark.parametrize("seed", range(5))
def test_every_tensor_is_in_one_group_within_the_threshold(seed):
    draw = random.Random(seed)
    tensors = [torch.zeros(draw.randrange(50), dtype=draw.choice((torch.float32, torch.float64)))
               for _ in range(60)]
    groups = fuse_tensors(tensors, 256)
    assert sorted(i for group in groups for i in group) == list(range(60))
    for group in groups:
        assert group == sorted(group) and len({tensors[i].dtype for i in group}) == 1
        assert len(group) == 1 or sum(tensors[i].nbytes for i in group) <= 256


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


def rounds_of(names, rank, rounds):
    """The rounds in which `rank` has its names, the same in every process: {round: [names]}."""
    draw, ready = random.Random(f"order {rank}"), [[] for _ in range(rounds)]
    for name in draw.sample(names, len(names)):
        ready[draw.randrange(rounds)].append(name)
    return ready


def negotiate_in_rounds(names, rounds):
    table, agreed = {}, []
    for ready in rounds_of(names, dist.get_rank(), rounds):
        agreed.append(negotiate(ready, table))
    return agreed


@pytest.mark.parametrize("R", [1, 2, 3, 4])
def test_a_name_is_agreed_on_in_the_round_in_which_the_last_rank_has_it(R):
    names, rounds = [f"t{i}" for i in range(50)], 6
    ready = [rounds_of(names, r, rounds) for r in range(R)]
    seen = launch(negotiate_in_rounds, names, rounds, ranks=R)
    assert all(agreed == seen[0] for agreed in seen)
    for k, agreed in enumerate(seen[0]):
        complete = {n for n in names if max(next(i for i, one in enumerate(of_rank) if n in one)
                                            for of_rank in ready) == k}
        assert set(agreed) == complete and len(agreed) == len(complete)


def test_negotiate_inside_a_group():
    def in_halves():
        from ranklab.collectives import node_groups

        inside, _ = node_groups(2)
        node = dist.get_rank() // 2
        return negotiate([f"a{node}", f"b{dist.get_rank()}"], {}, inside)

    assert launch(in_halves, ranks=4) == [["a0"], ["a0"], ["a1"], ["a1"]]


def request(name="w", kind="allreduce", **about):
    return Request(name, kind, (2,), torch.float32, op="Sum")._replace(**about)


def coordinator(R=3):
    return Coordinator({0: tuple(range(R)), 1: (0, 2)}, Settings(), Recorder())


def test_a_process_set_that_is_not_there_is_refused_on_each_rank_whenever_it_asks():
    one, asks = coordinator(), [Request("a of set 7", "allreduce", process_set=7)]
    one.hear(1, asks)
    assert one.answer() == []  # rank 0 may be about to add the set
    one.hear(0, asks)
    assert "process set 7 was not added" in one.answer()[0].error
    one.hear(2, asks)  # a moment later than rank 0
    assert "process set 7 was not added" in one.answer()[0].error
    one.hear(1, asks)  # once more: now rank 0 has not been asked yet
    assert one.answer() == []
    one.sets[7] = (0, 1)
    one.hear(0, asks)
    assert one.answer()[0].error == ""


def test_the_coordinator_answers_when_all_have_asked():
    one = coordinator()
    one.hear(1, [request("a"), request("b")])
    one.hear(0, [request("b")])
    assert one.answer() == []
    one.hear(2, [request("b"), request("a")])
    assert [r.request.name for r in one.answer()] == ["b"]
    one.hear(0, [request("a")])
    assert [r.request.name for r in one.answer()] == ["a"]
    assert not one.table and not one.heard


def test_the_coordinator_knows_process_sets_and_joined_ranks():
    one = coordinator()
    one.hear(0, [request("a", process_set=1)])
    one.hear(2, [request("a", process_set=1)])
    assert len(one.answer()) == 1
    one.hear(0, [request("w")])
    one.hear(1, [JOIN])
    assert one.answer() == []
    one.hear(2, [JOIN])
    assert [r.request.name for r in one.answer()] == ["w"]
    one.hear(0, [request("g", kind="allgather"), JOIN])
    answers = one.answer()
    assert "a rank that has joined takes part in all-reduces only" in answers[0].error
    assert answers[1].request == JOIN and answers[1].sizes == (0,) and one.joined == []


def test_bits_go_there_and_back():
    for n in (1, 7, 8, 9, 161):
        for ready in (set(), {0}, set(range(n)), {n - 1}, set(range(0, n, 3))):
            bits = to_bits(ready, n)
            assert (from_bits(bits, n), bits.numel()) == (sorted(ready), -(-n // 8))
    assert negotiation_bytes(160, 64) == to_bits(set(), 161).numel() == 21
    assert negotiation_bytes(160, 64, request_bytes=76) == 63 * 160 * 76


def test_the_cache_forgets_the_least_recently_used():
    cache = ResponseCache(2)
    for name in "ab":
        cache.put(request(name), Response(request(name)))
    assert (cache.slot(request("a")), cache.slot(request("b"))) == (0, 1)
    assert cache.slot(request("a", shape=(3,))) is None and cache.slot(request("c")) is None
    assert cache.use(0).request.name == "a"
    cache.put(request("c"), Response(request("c")))
    assert (cache.slot(request("b")), cache.slot(request("c")), cache.slots) == (None, 1,
                                                                                 ["a", "c"])
    cache.evict("a")
    assert cache.slots == [None, "c"] and cache.slot(request("a")) is None
    nothing = ResponseCache(0)
    nothing.put(request("a"), Response(request("a")))
    assert nothing.slots == [] and nothing.slot(request("a")) is None


# --- settings -----------------------------------------------------------------------------------


def test_settings_come_from_arguments_then_from_the_environment(monkeypatch):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1000")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2.5")
    monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "7")
    settings = Settings.from_environment(cache_capacity=0)
    assert settings == Settings(1000, 2.5, 0)
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "fast")
    with pytest.raises(ValueError, match="HOROVOD_CYCLE_TIME=fast is no number"):
        Settings.from_environment()
    with pytest.raises(ValueError, match="fusion_threshold=-1 must not be negative"):
        Settings(fusion_threshold=-1)
    with pytest.raises(ValueError, match="stall_check=10.0 must be .* stall_shutdown=5"):
        Settings(stall_shutdown=5)


# --- compression --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, travels", [
    (torch.float32, torch.float16), (torch.float64, torch.float16), (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16), (torch.int64, torch.int64), (torch.bool, torch.bool)],
    ids=str)
def test_floats_travel_in_16_bits(dtype, travels):
    x = torch.tensor([1.0, 0.0, 1.0]).to(dtype)
    small, restore = compress_fp16(x)
    assert (small.dtype, restore(small).dtype) == (travels, dtype)
    assert torch.equal(restore(small), x) and x.dtype == dtype
    small, ctx = Compression.fp16.compress(x)
    assert torch.equal(Compression.fp16.decompress(small, ctx), x)
    assert Compression.none.decompress(*Compression.none.compress(x)) is x


def test_fp16_overflows_above_65504():
    small, restore = compress_fp16(torch.tensor([65504.0, 65520.0]))
    assert restore(small).tolist() == [65504.0, float("inf")]


@pytest.mark.parametrize("element, ranks", [(128, 512), (-128, 512), (65504, 2), (1e6, 1),
                                            (1, math.inf), (0, math.inf)])
def test_a_sum_in_16_bits_overflows_or_stops(element, ranks):
    assert ranks_until_infinite(element) == ranks


# --- Adasum -------------------------------------------------------------------------------------


def pairwise(vectors):
    """The definition, in one process and in double."""
    if len(vectors) == 1:
        return vectors[0].double()
    half = len(vectors) // 2
    a, b = pairwise(vectors[:half]), pairwise(vectors[half:])
    ab, aa, bb = a @ b, a @ a, b @ b
    return a * (1 - ab / (2 * aa) if aa > 0 else 1) + b * (1 - ab / (2 * bb) if bb > 0 else 1)


SIZES = ([9], [1, 5, 3], [4, 0, 4, 1], [1])


def gradients(rank, n, dtype):
    return torch.randn(n, generator=torch.Generator().manual_seed(rank)).to(dtype)


def adasums():
    seen = {}
    for dtype in (torch.float64, torch.float32, torch.float16):
        for sizes in SIZES:
            x = gradients(dist.get_rank(), sum(sizes), dtype)
            before = x.clone()
            seen[dtype, str(sizes)] = adasum(x, sizes)
            assert torch.equal(x, before)
    seen["shape"] = adasum(torch.ones(2, 3)).shape
    seen["zeros"] = adasum(torch.ones(4) * (dist.get_rank() == 0)), adasum(torch.zeros(3))
    x = gradients(dist.get_rank(), 64, torch.float32)
    with Traffic() as traffic:
        adasum(x)
    seen["bytes"] = traffic.sent_bytes
    scaled = adasum(x * 1024) / 1024
    seen["scaled"] = torch.equal(scaled, adasum(x))
    return seen


@pytest.mark.parametrize("R", [1, 2, 4, 8])
def test_adasum_is_its_definition_on_every_rank(R):
    everybody = launch(adasums, ranks=R)
    rounds = R.bit_length() - 1
    for seen in everybody:
        for dtype, close in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 2e-2)):
            for sizes in SIZES:
                parts = zip(*(gradients(r, sum(sizes), dtype).split(sizes) for r in range(R)))
                right = torch.cat([pairwise(list(part)) for part in parts])
                got = seen[dtype, str(sizes)]
                assert got.dtype == dtype
                torch.testing.assert_close(got.double(), right, atol=close, rtol=close)
                assert torch.equal(got, everybody[0][dtype, str(sizes)])
        assert seen["shape"] == (2, 3) and seen["scaled"]
        assert seen["zeros"][0].tolist() == [1.0] * 4 and seen["zeros"][1].tolist() == [0.0] * 3
        # As a ring, and three dot products in float64 for each round and each rank asked in it.
        dots = 24 * rounds * (rounds + 1) // 2
        assert seen["bytes"] == 2 * (R - 1) * 256 // R + dots


def test_adasum_adds_what_is_orthogonal_and_averages_what_is_equal():
    def both():
        rank = dist.get_rank()
        return adasum(torch.eye(4)[rank]), adasum(torch.tensor([3.0, 4.0]))

    for orthogonal, equal in launch(both, ranks=4):
        assert torch.equal(orthogonal, torch.ones(4)) and torch.equal(equal,
                                                                      torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("a, b, cosine, length", [
    (3, 4, 0, 5), (3, 3, 1, 3), (2, 2, -1, 0), (4, 4, 0.5, 3 * 3**0.5), (0, 7, 0.3, 7)])
def test_length_of_the_adasum_of_two(a, b, cosine, length):
    assert adasum_length(a, b, cosine) == pytest.approx(length)


def test_adasum_wants_a_power_of_two():
    def three():
        with pytest.raises(ValueError, match="in pairs: 3 is not a power of two"):
            adasum(torch.ones(3))

    launch(three, ranks=3)


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


def test_a_trace_has_a_row_for_each_tensor_and_microseconds(tmp_path):
    timeline([("a", "NEGOTIATE", 0.5, 1.0), ("b", "NEGOTIATE", 0.5, 2.0),
              ("a", "ALLREDUCE", 1.0, 1.25)], tmp_path / "t.json")
    assert read(tmp_path / "t.json") == {
        "a": [("NEGOTIATE", 5e5, 1e6), ("ALLREDUCE", 1e6, 1.25e6)], "b": [("NEGOTIATE", 5e5, 2e6)]}
    timeline([], tmp_path / "empty.json")
    assert read(tmp_path / "empty.json") == {}


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
        for _ in range(2):  # negotiated by name, then from the cache
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
        assert sum(e[0] in ("rank 0 is ready", "rank 1 is ready") for e in events) == 2
