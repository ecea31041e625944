"""The figures of lab 14: what interrupts a run, how often to save, what policies reach, a run that
survives.
"""

from ranklab.planner.published import table
from ranklab.plots.style import INK, MARKERS, TONES, bars, figure, line, styled

BEGINS = {"killed": "x", "killed in a save": "X", "stopped": "s", "left": "v", "corrupted": "*",
          "slow": "o", "disk full": "D"}


@styled
def interruptions(title="What interrupted Llama 3's training: 419 times in 54 days"):
    """A bar for each cause, the most frequent first; GPUs are dark (arXiv 2407.21783, table 5)."""
    rows = [row for row in table("failures")
            if "Table 5" in row["source"] and row["category"] != "all"]
    rows.sort(key=lambda row: -float(row["count"]))
    fig, ax = figure(7.6, 4.4)
    for index, (name, is_mine) in enumerate((("GPU and its memory", True), ("all else", False))):
        counts = [float(row["count"]) * ((row["category"] == "GPU") == is_mine) for row in rows]
        bars(ax, range(len(rows)), counts, index, name, barh=True)
    for place, row in enumerate(rows):
        ax.annotate(f"{float(row['count']):.0f}", (float(row["count"]), place), (4, 0),
                    textcoords="offset points", va="center", fontsize=9)
    ax.set_yticks(range(len(rows)), [row["component"] for row in rows])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="unexpected interruptions on 16,384 GPUs", title=title)
    ax.legend(loc="lower right")
    return fig


@styled
def intervals(goodput, optimal_interval, simulate, gaps, mean, checkpoints, restart,
              title="Useful work, by the time between two checkpoints"):
    """A line for each checkpoint time by `goodput`, dots where it was simulated, a ring at
    `optimal_interval`.

    gaps  seconds between failures, for `simulate`
    """
    fig, ax = figure(7.6, 3.8)
    grid = [60 * 2 ** (n / 4) for n in range(2, 36)]  # 1.4 minutes to 6 hours
    for index, save in enumerate(checkpoints):
        line(ax, [x / 60 for x in grid], [goodput(x, save, mean, restart) for x in grid], index,
             f"checkpoints of {save / 60:g} min" if save >= 60 else f"checkpoints of {save} s",
             marker="")
        ax.plot([x / 60 for x in grid[::3]], [simulate(x, save, gaps, restart) for x in grid[::3]],
                linestyle="none", marker=MARKERS[index], markersize=4, color=TONES[index])
        best = optimal_interval(save, mean)
        ax.plot(best / 60, goodput(best, save, mean, restart), linestyle="none", marker="o",
                markersize=13, markerfacecolor="none", color=INK)
    ax.set(xscale="log", ylim=(0, 1), title=title,
           xlabel="minutes of work between checkpoints (dots: simulated; rings: optimal_interval)",
           ylabel="share of the time\nthat is useful work")
    ax.set_xticks([2, 5, 10, 20, 60, 180], ["2", "5", "10", "20", "60", "180"])
    ax.minorticks_off()
    ax.legend(loc="lower center")
    return fig


@styled
def policies(scores, title="Useful work for each node-second that is paid"):
    """Bars for each regime, one for each policy.

    scores  {regime: {policy: score}}
    """
    fig, ax = figure(8.2, 3.4)
    names = [*next(iter(scores.values()))]
    for index, name in enumerate(names):
        places = [n + 0.27 * (index - 1) for n in range(len(scores))]
        bars(ax, places, [each[name] for each in scores.values()], index, name, width=0.25)
    ax.set_xticks(range(len(scores)), list(scores), rotation=12)
    ax.grid(axis="x", visible=False)
    ax.set(ylim=(0, 1), ylabel="score", title=title)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.1), ncols=len(names))
    return fig


@styled
def lives(found, steps, title="A run that survives: each launch, and what ended it"):
    """The step over the time, a line for each launch; marks are the faults that struck.

    found  a Survived
    """
    fig, ax = figure(8.2, 3.8)
    start = min(life.times[life.times > 0].min() for life in found.lives)
    layouts, seen = [*dict.fromkeys(life.layout for life in found.lives)], set()
    for life in found.lives:
        done = [n for n in range(life.times.shape[1]) if life.times[:, n].any()]
        at = [life.times[:, n].max() - start for n in done]
        index = layouts.index(life.layout)
        ax.plot(at, [life.first + n for n in done], color=TONES[index], marker=".", markersize=4,
                linewidth=1.6, linestyle=("-", "--", ":", "-.")[index % 4],
                label=f"{life.layout}" * (life.layout not in seen))
        seen.add(life.layout)
        for fault in life.faults:
            step = min(max(fault.step, life.first), life.last)
            x = at[done.index(step - life.first)] if step - life.first in done else at[-1]
            ax.plot(x, step, linestyle="none", marker=BEGINS.get(fault.kind, "x"), markersize=8,
                    color=INK, markerfacecolor="white")
            ax.annotate(fault.kind, (x, step), (-7, 4), textcoords="offset points",
                        fontsize=9, ha="right")
    ax.axhline(steps, color=INK, linewidth=0.8, linestyle=":")
    ax.set(xlabel="seconds since the first launch was up", ylabel="steps done", title=title,
           ylim=(-0.15 * steps, 1.08 * steps))
    ax.legend(loc="lower right")
    return fig
