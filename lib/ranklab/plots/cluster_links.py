"""The figures of lab 15 on networks: their speed, and the rings of an NCCL log over its nodes."""

import re

import numpy as np

from ranklab.cluster.acceptance import ROW
from ranklab.plots.style import FAINT, INK, TONES, bars, figure, styled

MOST = 4  # rings to draw, at most


@styled
def rings(log, title=None):
    """Draw the order in which the ring of each channel visits the ranks, and the ranks' nodes.

    log: an NcclLog
    """
    channels = sorted(log.rings)[:MOST]
    size = max((len(log.rings[channel]) for channel in channels), default=1)
    fig, ax = figure(min(9.0, 2.2 + 0.55 * size), 1.2 + 0.62 * max(1, len(channels)))
    nodes = sorted(log.hosts.values())
    node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
    exits = []
    for row, channel in enumerate(channels):
        ring = log.rings[channel]
        for place, rank in enumerate(ring):
            successor = ring[(place + 1) % len(ring)]
            link = log.links.get((channel, rank, successor), "")
            crosses = node_of.get(rank) != node_of.get(successor)
            exits += [rank] * crosses
            ax.annotate("", (place + 0.72, row), (place + 0.28, row), arrowprops={
                "arrowstyle": "->", "color": TONES[1] if crosses else INK,
                "linewidth": 2.2 if crosses else 1.0, "linestyle": "-" if link else ":"})
            even = node_of.get(rank, 0) % 2 == 0
            ax.text(place, row, rank, ha="center", va="center", fontsize=8 if size < 20 else 5,
                    bbox={"boxstyle": "round,pad=0.25", "edgecolor": INK, "linewidth": 0.8,
                          "facecolor": "white" if even else FAINT})
    if title is None:
        count = len(set(exits))
        title = f"{len(channels)} rings leave a node {len(exits)} times, " + (
            "each time by another rank" if count == len(exits) else f"by {count} ranks")
    ax.set(xlim=(-0.6, size), ylim=(max(1, len(channels)) - 0.4, -0.6), title=title,
           xlabel=f"order of the ranks in the ring; {len(nodes)} nodes, white and grey by turns\n"
           "thick arrows go to another node, the last one back to the first rank")
    ax.set_yticks(range(len(channels)), [f"channel {channel}" for channel in channels])
    ax.set_xticks([])
    ax.grid(visible=False)
    return fig


@styled
def networks(speeds, nbytes, title=None):
    """Draw a bar for each network: its GB/s, and the seconds for `nbytes`.

    speeds: {name: bytes/s}
    """
    fig, ax = figure(8, 0.9 + 0.5 * len(speeds))
    rates = [each / 1e9 for each in speeds.values()]
    bars(ax, range(len(rates)), rates, 0, barh=True)
    fast, *_, slow = sorted(rates, reverse=True)
    for place, rate in enumerate(rates):
        ax.annotate(f"{rate:.3g} GB/s; {nbytes / 1e9 / rate:.3g} s", (rate, place), (5, 0),
                    textcoords="offset points", va="center", fontsize=9)
    ax.set_yticks(range(len(rates)), list(speeds))
    ax.invert_yaxis()
    ax.set(xlim=(0, 1.3 * fast),
           title=f"The fastest network is {fast / slow:,.0f} times as fast as the slowest"
           if title is None else title,
           xlabel=f"GB/s out of a node; seconds for {nbytes / 1e9:.0f} GB")
    ax.grid(axis="y", visible=False)
    return fig


@styled
def pairs(outputs, title="A slow node is a thin cross, slow uplinks are a wide one"):
    """Draw a square for each pair of nodes, the darker the slower it is.

    outputs: {(node, node): the text of all_reduce_perf}; without a line of numbers it is 0 GB/s
    """
    nodes = [*dict.fromkeys(node for pair in outputs for node in pair)]
    square = np.full((len(nodes), len(nodes)), np.nan)
    for (a, b), text in outputs.items():
        rates = {int(row["size"]): float(row["busbw"]) for row in re.finditer(ROW, text)}
        for row, column in ((a, b), (b, a)):
            square[nodes.index(row), nodes.index(column)] = rates[max(rates)] if rates else 0.0
    fig, ax = figure(6.4, 4.6)
    image = ax.imshow(square, cmap="Greys_r", vmin=0.5 * np.nanmax(square))
    ticks = range(0, len(nodes), max(1, len(nodes) // 8))
    ax.set_xticks(ticks, [nodes[i] for i in ticks], rotation=90)
    ax.set_yticks(ticks, [nodes[i] for i in ticks])
    ax.grid(visible=False)
    ax.set(title=title)
    fig.colorbar(image, ax=ax, label="busbw of the pair, GB/s")
    return fig
