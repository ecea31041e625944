"""The figures of lab 11: loads over training, bytes from rank to rank, the cost of a hot expert."""

import numpy as np
from matplotlib.patches import Rectangle

from ranklab.plots.style import (
    FAINT, INK, TONES, bare_grid, bars, figure, human_bytes, line, styled,
)


@styled
def layer(chosen, ranks, n_experts, title=None):
    """Draw tokens on the left, experts on the right, and a line for each choice.

    The colours are the ranks of the tokens.
    chosen: [[experts of a token, ...] of each token, in rank order]
    """
    fig, ax = figure(8.2, 4.2)
    per_rank, each = len(chosen) // ranks, n_experts // ranks

    def at(i, n):
        return -(i + 0.5) / n

    for token, experts in enumerate(chosen):
        rank = token // per_rank
        for e in experts:
            ax.plot([0.12, 0.88], [at(token, len(chosen)), at(e, n_experts)], color=TONES[rank],
                    lw=1.4, ls=("-", "--", "-.", ":")[rank % 4])
    for rank in range(ranks):
        for x, text in ((0.02, f"rank {rank}'s tokens"), (0.98, f"rank {rank}'s experts")):
            ax.add_patch(Rectangle((x - 0.1, -(rank + 0.94) / ranks), 0.2, 0.88 / ranks,
                                   fc="white", ec=TONES[rank], lw=2))
            ax.text(x, -(rank + 0.5) / ranks, text, ha="center", va="center", fontsize=9)
    loads = np.bincount(np.ravel(chosen), minlength=n_experts).reshape(ranks, each).sum(1)
    for rank, load in enumerate(loads):
        ax.text(1.12, -(rank + 0.5) / ranks, f"{load} rows", va="center", fontsize=10)
    if title is None:
        title = f"Rank {loads.argmax()}'s experts get {loads.max()} rows, " \
                f"rank {loads.argmin()}'s only {loads.min()}"
    ax.set(xlim=(-0.12, 1.3), ylim=(-1.02, 0.02), title=title)
    ax.axis("off")
    return fig


@styled
def loads(runs, title=None):
    """Draw the load of the fullest expert in all layers over training, relative to the mean.

    runs: {name: [(step, loads of each layer)]}; a load of 1 is the mean
    """
    fig, ax = figure(7.4, 3.2)
    ends = []
    for index, (name, history) in enumerate(runs.items()):
        fullest = [max(map(max, layers)) for _, layers in history]
        ends.append(f"{fullest[-1]:.1f} {name}".strip())
        line(ax, [step for step, _ in history], fullest, index, name, markevery=4)
    ax.axhline(1, color=INK, lw=1)
    if title is None:
        title = f"At the end the fullest expert has {', '.join(ends)} times the mean load" \
            if len(ends) == 1 else f"Times the mean load, at the end: {', '.join(ends)}"
    ax.set(title=title, xlabel="step", ylabel="fullest expert,\ntimes the mean load",
           ylim=(0, None))
    if len(runs) > 1:
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


@styled
def matrix(nbytes, title=None):
    """Draw the bytes that each rank sends to each other rank.

    nbytes: (R, R)
    """
    R, most = len(nbytes), max(1, int(nbytes.max()))
    fig, ax = figure(1.6 + 0.9 * R, 1.2 + 0.8 * R)
    for r in range(R):
        for s in range(R):
            part = int(nbytes[r, s]) / most
            ax.add_patch(Rectangle((s - 0.48, r - 0.48), 0.96, 0.96, ec=FAINT,
                                   fc=TONES[0] if part else "white", alpha=part or 1))
            ax.text(s, r, human_bytes(int(nbytes[r, s])) if r != s else "stays", ha="center",
                    va="center", fontsize=8, color="white" if part > 0.5 else INK)
    bare_grid(ax, range(R), range(R))
    if title is None:
        ends = [{r, s} for r in range(R) for s in range(R) if nbytes[r, s] == most]
        common = set.intersection(*ends) if ends else set()
        title = f"The largest messages have {human_bytes(most)}" + (
            f", to or from rank {min(common)}" if len(common) == 1 else "")
    ax.set(xlim=(-0.6, R - 0.4), ylim=(R - 0.4, -0.6), aspect="equal", title=title,
           xlabel="to rank", ylabel="from rank")
    return fig


@styled
def hot(shares, times, title=None):
    """Draw the time of a layer, relative to even loads, by the share of all rows on one rank.

    times: {name: [ratio to the time with even loads]}
    """
    fig, ax = figure(7.4, 3.0)
    for index, (name, values) in enumerate(times.items()):
        line(ax, shares, values, index, name, markevery=4)
    if title is None:
        title = "Times the even time at most: " + ", ".join(
            f"{max(values):.3g} ({name})" for name, values in times.items())
    ax.set(title=title, xlabel="part of all rows that go to one rank",
           ylabel="time, times the even one", ylim=(0, None))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


@styled
def placed(before, after, title="Load of each rank"):
    """Draw the load of each rank, relative to the mean, for two plans.

    before, after: a list for each plan
    """
    fig, ax = figure(7.4, 2.8)
    for index, (name, values) in enumerate((("in order", before), ("placed", after))):
        bars(ax, [rank + 0.4 * index - 0.2 for rank in range(len(values))], values, index, name,
             width=0.38)
    ax.axhline(1, color=INK, lw=1, ls="--")
    ax.set(title=title, xlabel="rank", ylabel="times the mean", xticks=range(len(before)))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


@styled
def crossings(nodes, ways, title=None):
    """Draw how often a token crosses to other nodes, by the number of nodes.

    ways: {name: [mean of crossings for each number of nodes]}; the first sends for each expert
    """
    fig, ax = figure(7.4, 3.2)
    for index, (name, values) in enumerate(ways.items()):
        line(ax, nodes, values, index, name)
    if title is None:
        first, second = list(ways.values())[:2]
        savings = [1 - b / a for a, b in zip(first, second)]
        title = (f"Once to a node saves {savings[0]:.0%} between {nodes[0]} nodes, "
                 f"{savings[-1]:.0%} between {nodes[-1]}")
    ax.set_xscale("log", base=2)
    ax.set(title=title, xlabel="nodes over which the experts are spread", xticks=nodes,
           xticklabels=nodes, ylabel="crossings of a token", ylim=(0, None))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


@styled
def rounding(sizes, errors, title=None):
    """Draw the relative error of the numbers that are not outliers, by the size of the outliers.

    errors: for each size, {name of the format: relative error}
    """
    fig, ax = figure(7.4, 3.2)
    names = [*errors[0]]
    for index, name in enumerate(names):
        line(ax, sizes, [each[name] for each in errors], index, name)
    if title is None:
        k = min(range(len(sizes)), key=lambda i: abs(sizes[i] - 1000))
        title = f"Outliers of {sizes[k]:,} times: " + ", ".join(
            f"{name.split(',')[0]} is off by {100 * errors[k][name]:.3g}%" for name in names[:3:2])
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set(title=title, xlabel="outliers, times the other numbers",
           ylabel="relative error\nof the other numbers", ylim=(1e-3, 2))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig
