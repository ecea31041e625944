"""The figures of lab 07: what a rank holds over a step, rows of all sizes, hybrid groups."""

from matplotlib.patches import Patch, Rectangle

from ranklab.plots.boxes import arrow, box
from ranklab.plots.gantt import Span, boxed, gantt
from ranklab.plots.style import FAINT, INK, TONES, clean, figure, look, styled
from ranklab.plots.zero import one_step

WHOLE = {"facecolor": "#e6b88f", "lw": 0}  # rows of other ranks
MINE = {"facecolor": TONES[0], "edgecolor": "white", "lw": 0.5}
TONE = {"forward": 3, "backward": 4}  # and hatching
EMPTY = {"facecolor": "white", "edgecolor": INK, "hatch": "xxx", "lw": 0.5}


@styled
def over_a_step(blocks=4, ranks=4, rank=1, title=None):
    """Draw the rows that one rank holds over a step of ZeRO stage 3.

    The step is zero's one_step. The rank holds its own rows all the time, and the other ranks' rows
    only while their block is whole. The root stays whole from forward to backward.
    """
    works = one_step(3, blocks)
    end = max(work.end for work in works)
    computes = [work for work in works if work.kind in ("forward", "backward")]
    fig, ax = figure(8.2, 0.55 * blocks + 2)
    spans = [Span(0, work.start, work.end, TONE[work.kind], 0.7) for work in computes]
    for work in computes:
        boxed(ax, (work.start + work.end) / 2, 0, work.unit + 1, pad=0.6, fontsize=7)
    whole = [[(work.start, work.end) for work in works
              if work.kind == "weights" and work.unit == block] for block in range(blocks)]
    for lane, times in enumerate([*whole, [(0, computes[-1].end)]], 1):
        for row in range(ranks):
            kind, intervals = ("mine", [(0, end)]) if row == rank else ("whole", times)
            middle = lane - 0.4 + 0.8 * (row + 0.5) / ranks
            spans += [Span(middle, *time, kind, 0.8 / ranks) for time in intervals]
    names = ["computes", *(f"block {block + 1}" for block in range(blocks)), "root"]
    gantt(ax, spans, dict(enumerate(names)), {"mine": MINE, "whole": WHOLE})
    ax.set(xlim=(0, end), ylim=(blocks + 1.6, -0.5), xticks=[], xlabel="time",
           title="A rank keeps its own rows; a block's other rows come and go (a schematic)"
           if title is None else title)
    handles = [Patch(**MINE, label="its own rows"), Patch(**WHOLE, label="the other ranks' rows"),
               Patch(**look(3), label="forward"), Patch(**look(4), label="backward")]
    fig.legend(handles=handles, loc="outside lower center", ncols=4)
    return fig


@styled
def rows(shares):
    """Draw a lane for each parameter and a cell for each row; crossed cells are zeros in messages.

    shares: {name: [rows of rank 0, rows of rank 1, ...]}
    """
    fig, ax = figure(7.5, 0.5 * len(shares) + 0.9)
    ranks, spans = max(map(len, shares.values())), []
    longest = max(ranks * max(each) for each in shares.values())
    for lane, each in enumerate(shares.values()):
        place, most = 0, max(each)
        for rank, count in enumerate(each):
            spans += [Span(lane, place, place + count, rank, 0.7),
                      Span(lane, place + count, place + most, "zeros", 0.7)]
            boxed(ax, place + (count or most) / 2, lane, f"{rank}: {count}", fontsize=8)
            place += most
        for row in range(1, place):
            ax.plot((row, row), (lane - 0.35, lane + 0.35), color="white", lw=0.8)
    gantt(ax, spans, dict(enumerate(shares)), {"zeros": EMPTY})
    first = next(iter(shares.values()))
    ax.set(xlim=(0, longest), ylim=(len(shares) - 0.5, -0.5),
           title=f"{sum(first)} rows on {len(first)} ranks: {', '.join(map(str, first))}, and "
                 f"{len(first) * max(first) - sum(first)} rows of zeros travel, too",
           xlabel="row, with zeros at the end   (in the bars: rank: rows)")
    ax.grid(False)
    return fig


@styled
def hybrid(groups, per_node, title="One copy in each node; dashed: the same rows"):
    """Draw ranks as boxes in their nodes, with the rows of each; lines join the ranks of a group.

    groups: for each rank (ranks of `shards`, ranks of `replicas`)
    """
    nodes = -(-len(groups) // per_node)
    fig, ax = figure(1.5 * per_node + 1, 1.1 * nodes + 0.6)
    clean(ax)
    xy = [(rank % per_node, rank // per_node) for rank in range(len(groups))]
    for node in range(nodes):
        ax.add_patch(Rectangle((-0.45, node - 0.33), per_node - 0.1, 0.66, facecolor="#eef2f5",
                               edgecolor=FAINT))
        ax.text(-0.55, node, f"node {node}", ha="right", va="center")
    for pair in groups:
        for group, line, tone in zip(pair, ("-", "--"), TONES):
            for a, b in zip(group, group[1:]):
                arrow(ax, xy[a], xy[b], zorder=1, arrowstyle="-", linestyle=line, color=tone, lw=2)
    for rank, (shards, _) in enumerate(groups):
        part = f"{shards.index(rank) + 1} of {len(shards)}"
        box(ax, *xy[rank], f"rank {rank}\nrows {part}", height=0.5, fontsize=9)
    ax.set(xlim=(-1.2, per_node - 0.4), ylim=(nodes - 0.5, -0.5), title=title)
    return fig
