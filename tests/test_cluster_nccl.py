"""Lab 15, NCCL: what a value selects, what a network carries, what a log tells and means."""

import dataclasses
import re

import pytest

from ranklab.checks.cluster.nccl import CASES, COMPUTE
from ranklab.checks.cluster.nccl_text import RUNS, written
from ranklab.cluster.acceptance import (
    ROW, SIZES, Suspects, crossing_pairs, emulated_outputs, pair_rounds, perf_text,
    suspect_parts,
)
from ranklab.cluster.nccl import nccl_environment, node_bandwidth, selected
from ranklab.cluster.nccl_log import (
    LOGS, NcclLog, nccl_lines, read_log, read_nccl_log, suspects,
)
from ranklab.plots.cluster_links import pairs, rings


@pytest.mark.parametrize("value, wanted", [
    # the examples of NCCL's user guide
    ("eth", "eth0 eth1 eth10"), ("=eth0", "eth0"), ("=eth0,eth1", "eth0 eth1"),
    ("^docker", "eth0 eth1 eth10 lo"), ("^=docker0", "eth0 eth1 eth10 lo"), ("eth1", "eth1 eth10"),
    ("=eth0,=eth1", "eth0"), ("", "eth0 eth1 eth10 docker0 lo")])
def test_a_value_selects_interfaces_as_nccl_does(value, wanted):
    assert selected(value, "eth0 eth1 eth10 docker0 lo".split()) == wanted.split()


@pytest.mark.parametrize("value, wanted", [
    ("mlx5_1", "mlx5_1:1 mlx5_1:2 mlx5_10:1"), ("=mlx5_1", "mlx5_1:1 mlx5_1:2"),
    ("=mlx5_0:1,mlx5_1:2", "mlx5_0:1 mlx5_1:2"), ("^=mlx5_1,mlx5_10", "mlx5_0:1"),
    ("=mlx5_1::0:1", "mlx5_1:1 mlx5_1:2"), ("=mlx5_1:2:0:0", "mlx5_1:2")])
def test_a_value_selects_ports_as_nccl_does(value, wanted):
    assert selected(value, "mlx5_0:1 mlx5_1:1 mlx5_1:2 mlx5_10:1".split()) == wanted.split()


def test_bandwidth_is_that_of_what_is_selected():
    topology = CASES[0].topology  # 8 ports on rails, 4 for storage
    environment = nccl_environment(topology)
    assert node_bandwidth(topology, environment) == 400e9
    assert node_bandwidth(topology, {}) == 500e9  # NCCL alone takes the ports for storage, too
    assert node_bandwidth(topology, environment | {"NCCL_NET": "Socket"}) == 25e9 / 8
    down = dataclasses.replace(topology.nodes[1], hcas=COMPUTE[:3])
    assert node_bandwidth(dataclasses.replace(topology, nodes=(topology.nodes[0], down)),
                          environment) == 150e9


def test_lines_are_found_after_whatever_a_launcher_puts_before_them():
    line = "gpu-1.x:12:34 [3] NCCL INFO Using network IB"
    for before in ("", "[rank3]:", "3: ", "[1,3]<stdout>:", "12:30:45 ", "[2026-01-02 03:04:05] "):
        found, = nccl_lines(f"text\n{before}{line}\n")
        assert (found.host, found.pid, found.text) == ("gpu-1.x", 12, "Using network IB"), before
    for place in ("misc/socket.cc:49", "misc/socket.cc:49 (socketWait)"):
        found, = nccl_lines(f"a:1:2 [0] {place} NCCL WARN [Proxy Service 3] Failed")
        assert found.warns and found.text == "[Proxy Service 3] Failed"


def test_every_log_says_how_it_came_about_and_can_be_read():
    for path in LOGS.iterdir():
        text = path.read_text()
        assert re.match("# Captured: .*NCCL 2.28.9|# Not captured: ", text), path.name
        assert "/opt/" not in text and "/tmp/" not in text
        log = read_nccl_log(text)
        assert log != NcclLog() and bool(suspects(log)) == text.startswith("# Captured"), path


def test_what_logs_mean():
    assert "ranks [1] have not enqueued what others wait for" in suspects(
        read_nccl_log(read_log("waiting_rank")))
    assert "torch says nothing of ranks [2]: they may be dead" in suspects(
        read_nccl_log(read_log("killed_rank")))
    fast = RUNS["2 nodes of 4 GPUs, InfiniBand"]
    assert suspects(read_nccl_log(written(*fast)[0])) == []
    slow = suspects(read_nccl_log(written(*fast, gdr="")[0]))
    assert len(slow) == 1 and "NET/IB/0, NET/IB/1" in slow[0] and "through the host" in slow[0]


def test_the_figure_of_rings():
    for name, run in RUNS.items():
        log = read_nccl_log(written(*run)[0])
        fig = rings(log)
        assert "rank" in fig.alt(), name


START = "ncclCommSplit comm 0x{c} rank {r} nranks {n} cudaDev 0 parent 0x1 - Init START"
DONE = "comm 0x{c} rank {r} nranks {n} cudaDev 0 - Init COMPLETE"


@pytest.mark.parametrize("has_start", [True, False], ids=["with its start", "as older ones"])
def test_of_several_communicators_that_of_all_ranks_is_read(has_start):
    """Four ranks on two hosts, then pairs of them, and then all once more."""
    texts = {}
    for rank in range(4):
        lines = texts[rank] = []
        for number, (n, place, after) in enumerate((
                (4, rank, (rank + 1) % 4), (2, rank % 2, 1 - rank % 2), (4, rank, rank - 1))):
            about = {"c": f"{rank}{number}", "r": place, "n": n}
            lines += [START.format(**about)] * has_start
            lines += ["Channel 00/02 : " + " ".join(map(str, range(n)))] * (place == 0)
            lines += [f"Channel 00/0 : {place}[0] -> {after}[0] via P2P/CUMEM"]
            lines += [DONE.format(**about)]
    text = "\n".join(f"node{rank // 2}:{rank}:1 [0] NCCL INFO {line}"
                     for lines in zip(*(texts[rank] + [""] * 9 for rank in range(4)))
                     for rank, line in enumerate(lines))
    log = read_nccl_log(text)
    assert log.hosts == {"node0": (0, 1), "node1": (2, 3)} and log.rings == {0: (0, 1, 2, 3)}
    assert sorted(log.links) == [(0, 0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 0)]


def test_work_numbers_belong_to_their_group():
    said = ("[rank{}]:[E624 10:00:00.1 ProcessGroupNCCL.cpp:1834] [PG ID {} PG GUID {}({}) Rank {}]"
            " Timeout at NCCL work: 9, last enqueued NCCL work: {}, last completed NCCL work: 8.")
    lines = [said.format(rank, 0, 0, "default_pg", rank, 41) for rank in range(4)]
    lines += [said.format(rank, 3, 40 + rank // 2, "PIPELINE", rank % 2, 9 - (rank == 3))
              for rank in range(4)]
    log = read_nccl_log("\n".join(lines))
    assert log.entered == dict.fromkeys(range(4), 41)
    assert log.groups == {("40", "PIPELINE"): {0: 9, 1: 9}, ("41", "PIPELINE"): {2: 9, 3: 8}}
    assert suspects(log) == ["ranks [3] have not enqueued what others of PIPELINE wait for"]


@pytest.mark.parametrize("via, words", [
    ("NET/AWS Libfabric/0", "no GPUDirect RDMA on NET/AWS Libfabric/0"),
    ("NET/AWS Libfabric/0/GDRDMA", ""), ("NET/FastSocket/1", "over TCP"), ("SHM/direct", "SHM"),
    ("P2P/CUMEM", "")])
def test_slow_ways_have_other_names_too(via, words):
    said = suspects(NcclLog(links={(0, 0, 1): via}))
    assert len(said) == bool(words) and words in "".join(said)


@pytest.mark.parametrize("count", range(34))
def test_all_pairs_meet_once_in_the_fewest_rounds(count):
    rounds = pair_rounds([*range(count)])
    met = [frozenset(pair) for each in rounds for pair in each]
    assert len(met) == len({*met}) == count * (count - 1) // 2
    assert all(len({*sum(each, ())}) == 2 * len(each) for each in rounds)
    assert len(rounds) == (count - 1 + count % 2 if count > 1 else 0)


@pytest.mark.parametrize("seed", range(4))
def test_the_parts_that_were_made_slow_are_named(seed):
    slow = {"nodes": ("b0n3", "b3n1"), "uplinks": ("b1",), "pairs": (("b2n0", "b3n2"),)}
    for names in ((), ("nodes",), ("uplinks",), ("pairs",), ("nodes", "pairs"), tuple(slow)):
        case = {name: slow[name] for name in names}
        right = Suspects(*([*case.get(name, ())] for name in slow))
        assert suspect_parts(*emulated_outputs(5, 6, seed=seed, **case)) == right


def test_perf_text_has_nccl_tests_columns():
    rows = [*re.finditer(ROW, perf_text(360.0, ranks=16))]
    assert [int(row["size"]) for row in rows] == [*SIZES]
    assert rows[-1]["busbw"] == "360.00" and float(rows[0]["busbw"]) < 300
    for row in rows:  # busbw = algbw 2 (n - 1) / n, and algbw = bytes / time
        assert float(row["busbw"]) == pytest.approx(float(row["algbw"]) * 30 / 16, abs=0.02)
        assert float(row["algbw"]) == pytest.approx(int(row["size"]) / float(row["us"]) / 1e3,
                                                    rel=1e-3)
    captured = ("  8589934592    2147483648     float     sum      -1    47535  180.71  338.82"
                "      0    47743  179.92  337.35      0")
    assert re.search(ROW, captured).group("busbw", "wrong") == ("338.82", "0")


def test_the_figure_of_pairs():
    fig = pairs(emulated_outputs(2, 3, uplinks=("b1",))[0])
    square, = fig.axes[0].images
    rates = square.get_array()
    assert rates.shape == (6, 6)
    assert (rates < 300).sum() == 2 * crossing_pairs(2, 3)
