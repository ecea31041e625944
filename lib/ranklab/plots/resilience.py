"""The figures of lab 14: causes of interruption, how often to save, policies, and a run's lives."""

import math

import numpy as np
from matplotlib.patches import Patch

from ranklab.planner.published import table
from ranklab.plots.style import (
    FAINT, HATCHES, INK, TONES, bars, figure, line, look, styled,
)

PARTS = {"GPU": "GPU", "Network": "network", "Dependency": "software",
         "Unplanned Maintenance": "maintenance", "Host": "rest of the node", "Unknown": "unknown"}
FEW = 3  # smaller causes share one row


@styled
def interruptions(title=None):
    """Draw a bar for each cause: its unexpected interruptions (arXiv 2407.21783, table 5)."""
    rows = [(row["component"], PARTS[row["category"]], int(row["count"]))
            for row in table("failures")
            if row["source"].startswith("arXiv 2407.21783 Table 5") and row["category"] in PARTS]
    few = [count for *_, count in rows if count < FEW]
    rows = [each for each in rows if each[-1] >= FEW]
    rows.append((f"{len(few)} other causes", "others", sum(few)))
    fig, ax = figure(7.6, 4.4)
    for index, part in enumerate(dict.fromkeys(part for _, part, _ in rows)):
        marks = [(place, count) for place, (_, kind, count) in enumerate(rows) if kind == part]
        pale = {"facecolor": FAINT, "edgecolor": INK, "hatch": HATCHES[index % 5]}
        bars(ax, [place for place, _ in marks], [count for _, count in marks], index,
             f"{part}: {sum(count for _, count in marks)}", barh=True, **pale if index > 4 else {})
    for place, (*_, count) in enumerate(rows):
        ax.annotate(f"{count}", (count, place), (4, 0), textcoords="offset points", va="center",
                    fontsize=9)
    ax.set_yticks(range(len(rows)), [name for name, *_ in rows])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    whole = sum(count for *_, count in rows)
    gpu = sum(count for _, part, count in rows if part == "GPU")
    ax.set(title=f"GPUs caused {gpu / whole:.0%} of the {whole} interruptions of Llama 3"
           if title is None else title,
           xlabel="unexpected interruptions in 54 days on 16,384 GPUs\n(arXiv 2407.21783, table 5)")
    ax.legend(loc="lower right", title=f"{whole} in all",
              title_fontsize=9, alignment="left")
    return fig


@styled
def two_costs(checkpoint, mean, title="Save at the bottom: there both costs are equal"):
    """Draw the share of the time that checkpoints and lost work cost, over the interval.

    checkpoint, mean: seconds of a checkpoint, and mean seconds between two failures
    """
    fig, ax = figure(7.6, 3.2)
    minutes = np.geomspace(3, 120, 80)
    saving, lost = checkpoint / (60 * minutes), 60 * minutes / (2 * mean)
    for index, (shares, name) in enumerate((
            (saving, "checkpoints: C / T"), (lost, "lost work: T / 2M"),
            (saving + lost, "both together"))):
        line(ax, minutes, shares, index, name, marker="")
    best = int(np.argmin(saving + lost))
    ax.plot([minutes[best]], [(saving + lost)[best]], linestyle="none", marker="*", markersize=15,
            color=TONES[2], markeredgecolor="white", zorder=3, label="least")
    ax.set(xscale="log", ylim=(0, 0.4), xlim=(3, 120), title=title,
           xlabel="T, minutes of work between two checkpoints (log scale)",
           ylabel="share of the time that is lost")
    ax.set_xticks([3, 5, 10, 20, 40, 80])
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("")
    ax.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


@styled
def intervals(goodput, optimal_interval, simulate, gaps, mean, checkpoints=(20, 120, 600),
              restart=600, title=None):
    """Draw the useful share of the time over the work between two checkpoints.

    Each duration of a checkpoint has a line from the formula, dots from the simulation, and a star
    at the best interval by the formula.
    goodput, optimal_interval, simulate: as in ranklab.resilience; gaps: for simulate
    mean, checkpoints, restart: seconds
    """
    fig, ax = figure(7.6, 3.6)
    minutes, tops = np.geomspace(0.5, 400, 60), []
    for index, seconds in enumerate(checkpoints):
        shares = [number(goodput, 60 * each, seconds, mean, restart) for each in minutes]
        name = f"{seconds} s" if seconds < 120 else f"{seconds / 60:g} min"
        line(ax, minutes, shares, index, f"a checkpoint takes {name}", marker="")
        ax.plot(minutes[::4], [simulate(60 * each, seconds, gaps, restart)
                               for each in minutes[::4]],
                linestyle="none", marker="o", markersize=4, color=TONES[index],
                label="simulated" if index == len(checkpoints) - 1 else "")
        best = number(optimal_interval, seconds, mean)
        height = number(goodput, best, seconds, mean, restart) if best > 0 else math.nan
        tops.append(f"{best / 60:.0f}")
        ax.plot([best / 60], [height], linestyle="none", marker="*", markersize=15,
                color=TONES[index], markeredgecolor="white", zorder=3,
                label="optimal interval" if index == len(checkpoints) - 1 else "")
    ax.set(xscale="log", ylim=(0, 1), xlim=(0.4, 500),
           title=f"The longer a checkpoint takes, the rarer: every {', '.join(tops)} minutes"
           if title is None else title,
           xlabel="minutes of work between two checkpoints (log scale)",
           ylabel="useful share of the time")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


def number(function, *arguments):
    """Call the reader's function and return a float; NaN if it raises or does not return a number.
    """
    try:
        return float(function(*arguments))
    except Exception:
        return math.nan


@styled
def windows_taken(lives, stream, batch, title="A rank's own count is another place on three ranks"):
    """Draw a row for each life of a reader: its windows in the order of the stream, by rank.

    lives: {reader: [for each life, the steps of each rank, as lists of windows]}
    stream: all windows in order; batch: windows in a step
    """
    number = {window: k for k, window in enumerate(stream)}
    fig, ax = figure(8.2, 0.42 * sum(map(len, lives.values())) + 1.5)
    names = []
    for name, of_reader in lives.items():
        history = set()
        for life in of_reader:
            row = len(names)
            names.append(f"{name}, {len(life)} ranks")
            shares = [{number[window] for windows in steps for window in windows} for steps in life]
            for rank, numbers in enumerate(shares):
                bars(ax, *zip(*((row, size) for _, size in runs(numbers))), rank, barh=True,
                     left=[first for first, _ in runs(numbers)], linewidth=0.3)
            for first, size in runs(history & set().union(*shares)):
                ax.barh(row, size, left=first, height=1, facecolor="none", edgecolor=INK)
            history.update(*shares)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(title=title, xlabel="number of the window in the stream",
           xticks=range(0, len(stream) + 1, 2 * batch), xlim=(0, len(stream)))
    ranks = max(len(life) for of_reader in lives.values() for life in of_reader)
    ax.legend(handles=[Patch(**look(rank), label=f"rank {rank}") for rank in range(ranks)]
              + [Patch(facecolor="white", edgecolor=INK, label="a second time")],
              loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


def runs(numbers):
    """Return [(first, length)] for each run of consecutive numbers."""
    firsts = sorted(n for n in numbers if n - 1 not in numbers)
    return [(n, next(i for i in range(1, len(numbers) + 1) if n + i not in numbers))
            for n in firsts]


@styled
def named_nodes(results, title="5% for each node names mostly healthy nodes"):
    """Draw the nodes that are named over the days of the log: lemons, and healthy nodes on top.

    results: {rule: {days: (lemons named, healthy nodes named)}}
    """
    fig, ax = figure(8.2, 3.2)
    days = [*next(iter(results.values()))]
    for index, (rule, counts) in enumerate(results.items()):
        x = [place + 0.4 * (index - 0.5) for place in range(len(days))]
        lemons, healthy = zip(*(counts[each] for each in days))
        bars(ax, x, lemons, 2 * index, f"{rule}: lemons", width=0.36)
        bars(ax, x, healthy, 2 * index + 1, f"{rule}: healthy nodes", width=0.36, bottom=lemons)
    ax.set_xticks(range(len(days)), [f"{each} days" for each in days])
    ax.grid(axis="x", visible=False)
    ax.set(title=title, xlabel="length of the log", ylabel="nodes that are named")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


@styled
def policies(scores, title=None):
    """Draw groups of bars: the score of each policy in each regime of failures.

    scores: {regime: {policy: score}}
    """
    fig, ax = figure(8.2, 3.4)
    names = [*next(iter(scores.values()))]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [group + (index - (len(names) - 1) / 2) * width for group in range(len(scores))]
        values = [each[name] for each in scores.values()]
        bars(ax, places, values, index, name, width=0.95 * width)
        for x, value in zip(places, values):
            ax.annotate(f"{value:.2f}", (x, value), (0, 2),
                        textcoords="offset points", ha="center", fontsize=8)
    ax.set_xticks(range(len(scores)), [name.replace(" ", "\n", 1) for name in scores])
    ax.grid(axis="x", visible=False)
    if title is None:
        least = {name: min(each[name] for each in scores.values()) for name in names}
        title = "In the worst regime: " + ", ".join(f"{value:.2f} ({name})"
                                                    for name, value in least.items())
    ax.set(title=title, ylabel="useful work for each\nnode-second that is paid", ylim=(0, 1.05))
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, -0.36), ncols=len(names))
    return fig


@styled
def lives(run, steps):
    """Draw a row for each launch: its steps (white if lost and computed again), and what ended it.

    run: a Survived of projects/resilience/survive.py
    """
    fig, ax = figure(8.2, 0.42 * len(run.lives) + 1.7)
    layouts = [*dict.fromkeys(str(life.layout) for life in run.lives)]
    repeats = 0
    for row, life in enumerate(run.lives):
        counts = min([successor.first for successor in run.lives[row + 1:]] + [life.last])
        counts = max(life.first, counts)
        repeats += life.last - counts
        index = layouts.index(str(life.layout))
        bars(ax, [row], [counts - life.first], index, barh=True, left=life.first)
        ax.barh([row], [life.last - counts], left=counts, facecolor="white",
                edgecolor=TONES[index % 5], linewidth=1.4, linestyle="--")
        ax.plot([life.first] * 2, [row - 0.4, row + 0.4], color=INK, linewidth=1.6)
        words = [f"{fault.kind} (rank {fault.rank % life.layout.ranks})"
                 for fault in sorted(life.faults, key=lambda fault: fault.step)]
        ax.annotate(", ".join(words) or life.ended[:40], (life.last, row), (5, 0),
                    textcoords="offset points", va="center", fontsize=9)
    ax.set_yticks(range(len(run.lives)), [f"launch {row + 1}" for row in range(len(run.lives))])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="step", xlim=(-0.5, 1.45 * steps), xticks=range(0, steps + 1, 5))
    ax.axvline(steps, color=INK, linewidth=0.8, linestyle=":")
    patch = Patch(facecolor="white", edgecolor=INK, linestyle="--", label="lost, computed again")
    ax.legend(handles=[Patch(**look(index), label=each) for index, each in enumerate(layouts)]
              + [patch], loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    fig.suptitle(f"{len(run.lives)} launches: {repeats} steps are computed again, and step "
                 f"{run.lives[-1].last} is reached")
    return fig
