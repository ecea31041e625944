"""The figures of lab 13: predicted beside published, where steps go, and what more GPUs bring."""

from ranklab.plots.style import (
    FAINT, INK, MARKERS, TONES, bars, figure, line, seconds_axis, styled,
)

SOURCES = {"llm_foundry_mpt": "MosaicML", "nvidia_nemo": "NeMo", "bigscience_176b": "BigScience",
           "internevo": "InternEvo", "zero_bubble": "zero bubble"}
PARTS = {"computing": ("products", "attention", "other"), "again": ("recompute",),
         "messages": ("tensor", "context", "expert", "weights", "pipeline", "data"),
         "bubble": ("bubble",), "optimizer, rest": ("optimizer", "rest")}


@styled
def published(runs, title="What the planner says, and what was measured"):
    """A mark for each run: published seconds of a step across, predicted ones up.

    runs  [(source, published, predicted)]
    """
    fig, ax = figure(6.4, 4.8)
    low, high = (edge(value for _, *both in runs for value in both) for edge in (min, max))
    ends = [low / 1.5, high * 1.5]
    ax.fill_between(ends, [0.8 * x for x in ends], [1.2 * x for x in ends], color=FAINT, alpha=0.6,
                    linewidth=0, label="within 20%")
    ax.plot(ends, ends, color=INK, linewidth=0.8)
    shown = [*SOURCES, None]
    for index, name in enumerate(shown):
        mine = [each for each in runs if each[0] == name or name is None and each[0] not in SOURCES]
        if mine:
            ax.plot([each[1] for each in mine], [each[2] for each in mine], linestyle="none",
                    marker=[*MARKERS, "+"][index], markersize=4, alpha=0.7,
                    color=[*TONES, INK][index], label=SOURCES.get(name, "others"))
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=title)
    seconds_axis(ax.xaxis)
    seconds_axis(ax.yaxis)
    ax.set_xlabel("published step time")
    ax.set_ylabel("predicted step time")
    ax.legend(loc="upper left")
    return fig


@styled
def steps(found, title="Where a step goes"):
    """A bar for each plan: the parts of its Step, those that are alike added up.

    found  {name: Step}
    """
    fig, ax = figure(8.2, 0.5 * len(found) + 1.6)
    left = [0.0] * len(found)
    for index, (name, parts) in enumerate(PARTS.items()):
        widths = [sum(getattr(step, part) for part in parts) for step in found.values()]
        bars(ax, range(len(found)), widths, index, name, barh=True, left=left)
        left = [a + b for a, b in zip(left, widths)]
    for row, whole in enumerate(left):
        ax.text(whole, row, f" {whole:.1f} s", va="center", fontsize=9)
    ax.set_yticks(range(len(found)), list(found))
    ax.invert_yaxis()
    ax.set_xlim(0, 1.1 * max(left))
    ax.set_xlabel("seconds of a step")
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(PARTS))
    fig.suptitle(title, fontsize=11, weight="bold")
    return fig


@styled
def scaling(curves, title="What more GPUs bring"):
    """Efficiency over the number of GPUs, one line for each curve.

    curves  {name: [(GPUs, tokens/s, efficiency)]}
    """
    fig, ax = figure(6.8, 3.2)
    for index, (name, curve) in enumerate(curves.items()):
        line(ax, [each[0] for each in curve], [each[2] for each in curve], index, name)
    counts = [each[0] for each in next(iter(curves.values()))]
    ax.set_xscale("log", base=2)
    ax.set_xticks(counts, [f"{count:,}" for count in counts])
    ax.set_ylim(0, 1.05)
    ax.set_xlabel("GPUs")
    ax.set_ylabel("tokens/s of a GPU,\nbeside those of the fewest")
    ax.set_title(title)
    ax.legend()
    return fig
