"""Lab 15, NCCL: what a value selects, what a network carries, what a log tells and means."""

import dataclasses
import re

import pytest

from ranklab.checks.cluster.nccl import CASES, COMPUTE
from ranklab.checks.cluster.nccl_text import RUNS, written
from ranklab.cluster.nccl import nccl_environment, node_bandwidth, selected
from ranklab.cluster.nccl_log import (
    LOGS, NcclLog, nccl_lines, read_log, read_nccl_log, suspects,
)
from ranklab.plots.cluster_links import rings


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
