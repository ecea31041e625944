"""The figures of the deck 15_cluster.md."""
from dataclasses import replace

import numpy as np

from ranklab.cluster.acceptance import emulated_outputs
from ranklab.cluster.alarm import rule_alarm, score, sick_rank_alarm
from ranklab.cluster.nccl import (
    Hca, Interface, Node, Topology, nccl_environment, node_bandwidth,
)
from ranklab.cluster.nccl_log import read_log, read_nccl_log
from ranklab.cluster.recordings import MFU, SCRAPE, SECONDS, record, recordings
from ranklab.cluster.storage import EFS, LUSTRE, S3, TECTONIC, Load, storage_plan
from ranklab.collectives import best_sent_bytes
from ranklab.plots import cluster as plots
from ranklab.plots import cluster_links
from ranklab.plots.style import FAINT, INK, TONES, figure, line, styled

NODES, GRADIENTS = 32, 14e9  # bytes: 7B parameters in bf16
CARDS = tuple(Hca(f"mlx5_{i}", 400) for i in (0, 1, 3, 4, 5, 6, 8, 9))
STORAGE = tuple(Hca(f"mlx5_{i}", 200, use="storage") for i in (2, 7, 10, 11))
LLAMA = Load(2048, 8, 25e9, 14 * 405.85e9, 1200.0)


def fallback():
    ethernet = (Interface("lo", 0, "host"), Interface("eth0", 25))
    topology = Topology(tuple(Node(f"gpu{i:02}", ethernet, CARDS + STORAGE)
                              for i in range(NODES)), fabric="rails")
    right = nccl_environment(topology)
    settings = {
        "nccl_environment's: 8 cards": right,
        "NCCL_IB_HCA=mlx5_1\na prefix: 10 and 11 of storage, too": {"NCCL_IB_HCA": "mlx5_1"},
        "NCCL_IB_HCA==mlx5_1:1\none card of eight": {"NCCL_IB_HCA": "=mlx5_1:1"},
        "NCCL_IB_DISABLE=1\nsockets, on eth0": {  # as NCCL_NET=Socket, where there is no plugin
            "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": right["NCCL_SOCKET_IFNAME"]}}
    speeds = {name: node_bandwidth(topology, each) for name, each in settings.items()}
    sent = best_sent_bytes("all_reduce", GRADIENTS, NODES)
    return cluster_links.networks(speeds, sent, title=""), 8.4, 3.2


def rings():
    return cluster_links.rings(read_nccl_log(read_log("two_nodes")), title=""), 8.4, 3.3


def _usual(values):
    """The median of two minutes: a pause of one scrape is not in it."""
    return np.array([np.nanmedian(values[max(0, i - 7):i + 1], axis=0)
                     for i in range(len(values))])


@styled
def average():
    """An emulated run with a slow rank: on the left two numbers of the run, on the right all ranks.
    """
    run = record("slow host CPU", seed=0)
    own, minutes = run.metrics[SECONDS], np.arange(len(run.metrics[MFU])) * SCRAPE / 60
    fig, (left, right) = figure(8, 3.3, cols=2, sharey=True)
    for index, (values, label) in enumerate((
            (np.nanmean(own, axis=1), "own time, mean of all ranks"),
            (1 / run.metrics[MFU], "the whole step: 1 / MFU"))):
        line(left, minutes, _usual(values / np.nanmedian(values[:run.onset])), index, label,
             marker="")
    ratios = _usual(own / np.nanmedian(own, axis=1)[:, None])
    for rank, values in enumerate(ratios.T):
        sick = rank in run.sick
        right.plot(minutes, values, color=TONES[1] if sick else FAINT, linewidth=2 if sick else 0.7,
                   zorder=2 + sick, label=f"rank {rank}" * sick)
    for ax in (left, right):
        ax.set_ylim(0.9, 1.36)
        ax.axvline(run.onset * SCRAPE / 60, color=INK, linewidth=0.8, linestyle=":")
        ax.set_xlabel("minutes (dotted: it begins)")
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    left.set_ylabel("times the usual")
    right.set_ylabel("own time / median of ranks")
    return fig, 8, 3.3


def alarms():
    runs = recordings(range(3))
    return plots.alarms({"sick_rank_alarm": score(sick_rank_alarm, runs),
                         "straggler_rule(1.2, 5)": score(rule_alarm, runs)}, title=""), 8.4, 3.2


@styled
def storage():
    """Seconds of a checkpoint of 5.7 TB over the nodes that write it, for four file systems."""
    nodes = [2**i for i in range(3, 12)]
    fig, ax = figure(7.8, 3.5)
    for index, (system, sharded, label) in enumerate((
            (EFS, True, "NFS (EFS)"), (TECTONIC, False, "one rank writes"),
            (LUSTRE, True, "Lustre (FSx)"), (S3, True, "objects (S3)"),
            (TECTONIC, True, "Tectonic"))):
        plans = [storage_plan(replace(LLAMA, nodes=count, sharded=sharded), system)
                 for count in nodes]
        line(ax, nodes, [plan.save_seconds for plan in plans], index, label)
    ax.set(xscale="log", yscale="log", ylabel="a checkpoint of 5.7 TB takes",
           xlabel="nodes of 8 ranks, each node with 25 GB/s to the storage")
    ax.set_xticks(nodes, nodes)
    ax.set_yticks([1, 3, 10, 60, 600], ["1 s", "3 s", "10 s", "1 min", "10 min"])
    ax.minorticks_off()
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return fig, 7.8, 3.5


def pairs():
    outputs, _ = emulated_outputs(nodes=("b0n5",), uplinks=("b2",), pairs=(("b1n1", "b3n2"),))
    return cluster_links.pairs(outputs, title=""), 5.6, 3.8
