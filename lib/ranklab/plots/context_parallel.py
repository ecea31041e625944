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
    plans: {title: positions (R, T/R)} of a few tokens, each of which represents a part
    """
    fig, axes = figure(8.2, 2.2 + 1.5 * len(plans), rows=len(plans), cols=2, squeeze=False,
                       width_ratios=(1, 1.2))
    for (ax, right), (title, positions) in zip(axes, plans.items()):
        tokens = positions.numel()
        owner = torch.empty(tokens, dtype=torch.long)
        for rank, places in enumerate(positions):
            owner[places] = rank
        for query in range(tokens):
            for key in range(tokens):
                ax.add_patch(_cell(key, query, TONES[owner[query]] if key <= query else "white"))
                if key <= query:
                    ax.text(key, query, int(owner[key]), color="white", fontsize=8, ha="center",
                            va="center")
        bare_grid(ax, range(tokens), [f"{part}: rank {owner[part]}" for part in range(tokens)])
        ax.set(xlim=(-0.6, tokens - 0.4), ylim=(tokens - 0.4, -0.6), aspect="equal", title=title,
               xlabel="keys (in the cell: the rank that has them)", ylabel="queries")
        work = [sum(len(part.rows) * len(part.keys) if part.mask is None else int(part.mask.sum())
                    for part in causal_blocks(positions, rank)) for rank in range(len(positions))]
        for rank, scores in enumerate(work):
            bars(right, [rank], [scores], rank)
        right.axhline(sum(work) / len(work), color=INK, lw=1, ls="--")
        right.set(ylim=(0, tokens * 2), title=_who_waits(work), xticks=range(len(work)),
                  xlabel="rank", ylabel="blocks of scores")
    return fig


def _who_waits(work):
    longest = max(range(len(work)), key=work.__getitem__)
    return "All ranks have equal work" if len(set(work)) == 1 \
        else f"Rank {longest} has the most, and all wait for it"


def _cell(x, y, tone):
    return Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, fc=tone, ec=FAINT)


@styled
def by_length(lengths, nbytes, budget=None, title=None):
    """Draw the bytes that attention keeps for backward on each rank, by sequence length.

    `nbytes` is {name: [bytes]}, `budget` the bytes of a GPU.
    """
    fig, ax = figure(7.4, 3.4)
    if title is None:
        title = f"{lengths[-1] / lengths[-2]:g} times the tokens are " + ", ".join(
            f"{values[-1] / values[-2]:.2g} times the bytes with {name}"
            for name, values in [*nbytes.items()][:2])
    for index, (name, values) in enumerate(nbytes.items()):
        line(ax, lengths, values, index, name)
    ax.set(title=title, xlabel="tokens of a sequence", ylabel="bytes kept on each rank")
    _lengths_and_bytes(ax, lengths, budget)
    return fig


@styled
def held_by_length(lengths, whole, tiled, at, budget=None, title=None):
    """Draw the bytes that a rank holds by sequence length, for all tokens at once and in tiles.

    The title compares them at the length `at`.
    whole, tiled: {name: [bytes]}; what is in tiles has the colour of the same name in `whole`
    budget: the bytes of a GPU
    """
    fig, ax = figure(7.4, 3.6)
    if title is None:
        held = {name: values[lengths.index(at)] for name, values in whole.items()}
        largest = max(held, key=held.get)
        rest = "everything else" if 2 * held[largest] > sum(held.values()) else "each of the others"
        title = f"At {at // 1024}K tokens the {largest} are larger than {rest}"
    for index, (name, values) in enumerate(whole.items()):
        line(ax, lengths, values, index, name, linestyle="-")
        if name in tiled:
            line(ax, lengths, tiled[name], index, f"{name}, in tiles", linestyle=":")
    ax.set(title=title, xlabel="tokens on a rank", ylabel="bytes held on the rank")
    _lengths_and_bytes(ax, lengths, budget)
    return fig


def _lengths_and_bytes(ax, lengths, budget):
    """Give the axes of bytes by sequence length their scales, and draw the line of the budget."""
    if budget:
        ax.axhline(budget, color=INK, lw=1)
        ax.text(lengths[0], budget * 1.15, "memory of one GPU", fontsize=9)
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(lengths, [f"{n // 1024}K" if n < 2**20 else f"{n // 2**20}M" for n in lengths])
    ax.minorticks_off()
    bytes_axis(ax.yaxis)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))


@styled
def by_ranks(ranks, seconds, title=None):
    """Draw the time of one layer's attention by number of ranks.

    seconds: {name: [seconds]}; the last one is only the computation
    """
    fig, ax = figure(7.4, 3.3)
    if title is None:
        (name, first), *_, (_, compute) = seconds.items()
        hidden = [R for R, time, least in zip(ranks, first, compute) if time < 1.02 * least]
        title = f"The {name} hides its messages on up to {max(hidden)} ranks" if hidden else \
                f"The {name} hides its messages nowhere"
    for index, (name, times) in enumerate(seconds.items()):
        line(ax, ranks[: len(times)], times, index, name)
    ax.set(xscale="log", yscale="log", title=title, xlabel="ranks that share a sequence (cp)",
           ylabel="attention of one layer,\nforward and backward")
    ax.set_xticks(ranks, ranks)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.minorticks_off()
    seconds_axis(ax.yaxis)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


@styled
def by_position(losses):
    """Draw how much lower the first model's loss is at each position in the document.

    The first part of a sequence shows the difference that is not due to the context. With only one
    model its loss is drawn.
    losses: {name: [(position, nats per token)]} of one or two models, at the same positions
    """
    fig, ax = figure(7.4, 3.0)
    ax.set_xlabel("position in the sequence (tokens)")
    places, values = zip(*next(iter(losses.values())))
    if len(losses) < 2:
        line(ax, places, values, 0, "")
        ax.set(title="Held-out loss by position", ylabel="nats per token")
        return fig
    first, second = losses
    gaps = [loss - value for (_, loss), value in zip(losses[second], values)]
    bars(ax, places, gaps, 0, width=0.7 * (places[1] - places[0]))
    ax.axhline(gaps[0], color=TONES[1], lw=1.6, ls="--", label="as in the first part")
    later = sum(gaps[1:]) / len(gaps[1:]) - gaps[0]
    ax.set(title=f"In later parts the gap is {abs(later):.2f} nats "
                 f"{'larger' if later > 0 else 'smaller'} than in the first",
           ylabel=f"nats per token:\n{second} minus {first}")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return fig
