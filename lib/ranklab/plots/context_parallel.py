"""The figures of lab 10: who has which tokens and who waits, memory by length, ring or Ulysses."""

import torch
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator

from ranklab.context_parallel.block import causal_blocks
from ranklab.plots.style import (
    FAINT, INK, TONES, bare_grid, bars, bytes_axis, figure, line, seconds_axis, styled,
)


@styled
def masks(plans):
    """Draw the rank that computes each score, for each way to share the tokens, and its work.

    Queries run down, keys across; the right panel has the number of scores of each rank.
    plans: {title: positions (R, T/R)} of few tokens, each of which stands for a part
    """
    fig, axes = figure(8.2, 2.2 + 1.5 * len(plans), rows=len(plans), cols=2, squeeze=False,
                       width_ratios=(1, 1.2))
    for (ax, beside), (title, positions) in zip(axes, plans.items()):
        tokens = positions.numel()
        owner = torch.empty(tokens, dtype=torch.long)
        for rank, mine in enumerate(positions):
            owner[mine] = rank
        for query in range(tokens):
            for key in range(tokens):
                ax.add_patch(_cell(key, query, TONES[owner[query]] if key <= query else "white"))
                if key <= query:
                    ax.text(key, query, int(owner[key]), color="white", fontsize=8, ha="center",
                            va="center")
        bare_grid(ax, range(tokens), [f"{part}: rank {owner[part]}" for part in range(tokens)])
        ax.set(xlim=(-0.6, tokens - 0.4), ylim=(tokens - 0.4, -0.6), aspect="equal", title=title,
               xlabel="keys (in the cell: the rank that has them)", ylabel="queries")
        work = [sum(len(seen.rows) * len(seen.keys) if seen.mask is None else int(seen.mask.sum())
                    for seen in causal_blocks(positions, rank)) for rank in range(len(positions))]
        for rank, scores in enumerate(work):
            bars(beside, [rank], [scores], rank)
        beside.axhline(sum(work) / len(work), color=INK, lw=1, ls="--")
        beside.set(ylim=(0, tokens * 2), title="work of each rank", xticks=range(len(work)),
                   xlabel="rank", ylabel="blocks of scores")
    return fig


def _cell(x, y, tone):
    return Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, fc=tone, ec=FAINT)


@styled
def by_length(lengths, nbytes, budget=None, title="What attention keeps for backward"):
    """Draw the bytes on each rank by the length of the sequence.

    `nbytes` is {name: [bytes]}, `budget` the bytes of a GPU.
    """
    fig, ax = figure(7.4, 3.4)
    for index, (name, values) in enumerate(nbytes.items()):
        line(ax, lengths, values, index, name)
    if budget:
        ax.axhline(budget, color=INK, lw=1)
        ax.text(lengths[0], budget * 1.15, "memory of one GPU", fontsize=9)
    ax.set(xscale="log", yscale="log", title=title, xlabel="tokens of a sequence",
           ylabel="bytes on each rank")
    ax.set_xticks(lengths, [f"{n // 1024}K" if n < 2**20 else f"{n // 2**20}M" for n in lengths])
    ax.minorticks_off()
    bytes_axis(ax.yaxis)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


@styled
def by_ranks(ranks, seconds, title="Attention of one layer, forward and backward"):
    """Draw the time of one layer's attention by number of ranks; `seconds` is {name: [seconds]}."""
    fig, ax = figure(7.4, 3.3)
    for index, (name, times) in enumerate(seconds.items()):
        line(ax, ranks[: len(times)], times, index, name)
    ax.set(xscale="log", yscale="log", title=title, xlabel="ranks that share a sequence (cp)",
           ylabel="seconds")
    ax.set_xticks(ranks, ranks)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.minorticks_off()
    seconds_axis(ax.yaxis)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


@styled
def by_position(losses, title="Held-out loss by position"):
    """Draw nats per token by position in the document; `losses` is {name: [(position, loss)]}."""
    fig, ax = figure(7.4, 3.2)
    for index, (name, points) in enumerate(losses.items()):
        line(ax, *zip(*points), index, name)
    ax.set(title=title, xlabel="position in the sequence (tokens)", ylabel="nats per token")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig
