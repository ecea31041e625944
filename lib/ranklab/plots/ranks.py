"""The figures of lab 00: where ranks run, the part of each rank, how a token travels, which rank
waits."""

import math

from matplotlib.patches import FancyBboxPatch

from ranklab.engine.report import count_ranks
from ranklab.plots.boxes import arrow, disc
from ranklab.plots.gantt import boxed
from ranklab.plots.style import (FAINT, INK, TONES, bars, bytes_axis, clean, figure,
                                 human_bytes, line, seconds_axis, styled)
from ranklab.ranks import coordinates


@styled
def world(ranks, nodes=1, title="RANK counts over all nodes, LOCAL_RANK inside each"):
    """Draw nodes as boxes, ranks as circles, and a row for each number that torchrun assigns."""
    per_node = ranks // nodes
    fig, ax = figure(0.57 * (ranks + 3), 1.75)
    clean(ax)
    for y, name in ((1.15, "GROUP_RANK"), (0.3, "RANK"), (-0.5, "LOCAL_RANK")):
        ax.text(-0.8, y, name, ha="right", va="center")
    for node in range(nodes):
        left = node * (per_node + 0.3)
        ax.add_patch(FancyBboxPatch((left - 0.45, -0.75), per_node - 0.1, 1.55, fc="#eef2f5",
                                    ec=INK, boxstyle="round,pad=0.05"))
        ax.text(left + per_node / 2 - 0.5, 1.15, f"{node}  (node {node})", ha="center",
                va="center")
    for rank in range(ranks):
        node, local_rank = coordinates(rank, ranks, nodes)
        x = rank + 0.3 * node
        disc(ax, x, 0.3, rank, 0.36, fontsize=13, fontweight="bold")
        ax.text(x, -0.5, str(local_rank), ha="center", va="center", fontsize=12)
    ax.set(xlim=(-3, ranks + 0.3 * (nodes - 1) - 0.4), ylim=(-0.85, 1.4), aspect="equal",
           title=title)
    return fig


@styled
def shards(shard_range, n, sizes=(2, 3, 4, 8), title=None):
    """Draw the part of range(n) that each rank gets from `shard_range`, a row per world size."""
    fig, ax = figure(7.5, 0.5 * len(sizes) + 1)
    spread = 0
    for row, size in enumerate(sizes):
        parts = [shard_range(n, rank, size) for rank in range(size)]
        spread = max(spread, max(map(len, parts)) - min(map(len, parts)))
        for rank, part in enumerate(parts):
            if not len(part):
                continue
            bars(ax, row, len(part), rank, barh=True, left=part[0])
            boxed(ax, part[0] + len(part) / 2, row, f"{rank}: {len(part)}", pad=1, fontsize=9)
    ax.set_yticks(range(len(sizes)), [count_ranks(size) for size in sizes])
    if title is None:
        title = f"The parts of a row differ in length by at most {spread}"
    ax.set(xlabel=f"item of range({n})   (in the bars: rank: how many)", xlim=(0, n), title=title)
    ax.invert_yaxis()
    ax.grid(False)
    return fig


@styled
def time_held(seconds, title=None):
    """Draw how long each rank was inside a call.

    `seconds` has one duration per rank.
    """
    fig, ax = figure(7, 0.28 * len(seconds) + 1)
    bars(ax, range(len(seconds)), [s * 1e3 for s in seconds], 0, barh=True)
    ax.set_yticks(range(len(seconds)), [f"rank {rank}" for rank in range(len(seconds))])
    ax.set(xlabel="ms until the call returned", title=title)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    return fig


@styled
def who_waits(waits, ranks):
    """Draw an arrow from each rank to the rank it waits for; `waits` is {rank: rank}."""
    fig, ax = figure(3.2, 3.2)
    clean(ax)
    angle = [math.pi / 2 - 2 * math.pi * rank / ranks for rank in range(ranks)]
    places = [(math.cos(a), math.sin(a)) for a in angle]
    for rank, (x, y) in enumerate(places):
        fill, ink = (TONES[0], "white") if rank in waits else (FAINT, INK)
        disc(ax, x, y, rank, 0.24, fill, ink, fontsize=14, fontweight="bold")
    for waiter, awaited in waits.items():
        arrow(ax, places[waiter], places[awaited], zorder=1, arrowstyle="-|>", lw=2,
              color=TONES[1], shrinkA=20, shrinkB=20, connectionstyle="arc3,rad=-0.15")
    ax.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal")
    lasts = {_last(waits, rank) for rank in waits}
    ax.set_title("Each waits for the next: a deadlock" if None in lasts else
                 f"All wait for rank {lasts.pop()}" if len(lasts) == 1 else "Who waits for whom")
    return fig


def _last(waits, rank):
    """Return the rank at the end of a chain of waits, or None if the chain is a circle."""
    visits = set()
    while rank in waits:
        if rank in visits:
            return None
        visits.add(rank)
        rank = waits[rank]
    return rank


@styled
def times_by_size(rows, label):
    """Draw measured time against size, both on logarithmic axes.

    `rows` is [(bytes, seconds)], the smallest first.
    """
    fig, ax = figure(6.5, 2.8)
    flat = max(nbytes for nbytes, seconds in rows if seconds < 1.5 * rows[0][1])
    line(ax, *zip(*rows), 0, label)
    ax.set(xscale="log", yscale="log", xlabel="size of the tensor", ylabel="time",
           title=f"Up to {human_bytes(flat)} all sizes take about equally long: the latency")
    times = [seconds for _, seconds in rows]  # whole decades, so that two ticks at least are named
    ax.set_ylim(10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times))))
    bytes_axis(ax.xaxis)
    seconds_axis(ax.yaxis)
    ax.legend(loc="upper left")
    return fig
