"""The figures of lab 13: predicted against published, the parts of a step, scaling; and of
`ranklab plan`: time against memory, dollars against days.
"""

from ranklab.planner.search import rank
from ranklab.plots.style import (
    FAINT, INK, MARKERS, TONES, bars, bytes_axis, figure, human_seconds, line, seconds_axis, styled,
)

SOURCES = {"llm_foundry_mpt": "MosaicML", "nvidia_nemo": "NeMo", "bigscience_176b": "BigScience",
           "internevo": "InternEvo", "zero_bubble": "zero bubble"}
PARTS = {"computing": ("products", "attention", "other"), "recompute": ("recompute",),
         "messages": ("tensor", "context", "expert", "weights", "pipeline", "data"),
         "bubble": ("bubble",), "optimizer, rest": ("optimizer", "rest")}


@styled
def published(runs, title=None):
    """Draw a mark for each run: published seconds of a step across, predicted ones up.

    In each of the three sources with the largest errors, the run with the largest error is named.
    runs: [(source, published, predicted, name)]
    """
    if title is None:
        near = sum(abs(guess / seconds - 1) < 0.2 for _, seconds, guess, _ in runs) / len(runs)
        title = f"Within 20% for {int(10 * near)} published runs of 10"
    fig, ax = figure(6.4, 4.8)
    low, high = (edge(value for _, *times, _ in runs for value in times) for edge in (min, max))
    ends = [low / 1.5, high * 1.5]
    ax.fill_between(ends, [0.8 * x for x in ends], [1.2 * x for x in ends], color=FAINT, alpha=0.6,
                    linewidth=0, label="within 20%")
    ax.plot(ends, ends, color=INK, linewidth=0.8)
    sources = [*SOURCES, None]
    for index, name in enumerate(sources):
        dots = [each for each in runs if each[0] == name or name is None and each[0] not in SOURCES]
        if dots:
            ax.plot([each[1] for each in dots], [each[2] for each in dots], linestyle="none",
                    marker=[*MARKERS, "+"][index], markersize=4, alpha=0.7,
                    color=[*TONES, INK][index], label=SOURCES.get(name, "others"))
    worst = sorted(_outliers(runs), key=lambda run: run[2], reverse=True)
    for row, (_, seconds, guess, name) in enumerate(worst):  # below the dots, in the order of these
        ax.annotate(f"{name}:\n{seconds / guess:.1f} times as long as predicted", (seconds, guess),
                    (0.98, 0.43 - 0.13 * row), textcoords="axes fraction", fontsize=8, va="top",
                    ha="right", arrowprops={"arrowstyle": "-", "color": INK, "lw": 0.7})
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=title)
    seconds_axis(ax.xaxis)
    seconds_axis(ax.yaxis)
    ax.set_xlabel("published step time")
    ax.set_ylabel("predicted step time")
    ax.legend(loc="upper left")
    return fig


def _outliers(runs, number=3):
    """Return the most underpredicted run of each source, for the `number` worst sources."""
    worst = {}
    for run in sorted(runs, key=lambda run: run[1] / run[2], reverse=True):
        worst.setdefault(run[0], run)
    return [*worst.values()][:number]


@styled
def steps(results, title=None):
    """Draw a bar for each plan: the parts of its Step, with similar ones added up.

    results: {name: Step}
    """
    fig, ax = figure(8.2, 0.5 * len(results) + 1.6)
    left, longest = [0.0] * len(results), max(step.total for step in results.values())
    for index, (name, parts) in enumerate(PARTS.items()):
        widths = [sum(getattr(step, part) for part in parts) for step in results.values()]
        is_large = max(widths) > 0.005 * longest  # else the legend names an invisible part
        bars(ax, range(len(results)), widths, index, name if is_large else "", barh=True, left=left)
        left = [a + b for a, b in zip(left, widths)]
    if title is None:
        computing = min(sum(getattr(step, part) for part in PARTS["computing"]) / step.total
                        for step in results.values())
        title = f"Computing is {computing:.0%} of a step or more"
    for row, whole in enumerate(left):
        ax.annotate(f"{whole:.1f} s", (whole, row), (4, 0), textcoords="offset points",
                    va="center", fontsize=9)
    ax.set_yticks(range(len(results)), list(results))
    ax.invert_yaxis()
    ax.set_xlim(0, 1.1 * longest)
    ax.set_xlabel("seconds of a step")
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(PARTS))
    fig.suptitle(title)
    return fig


@styled
def scaling(curves, title=None):
    """Draw the efficiency over the number of GPUs; the title names the lowest one.

    A curve that stays within 2% is only a line with its name, because it has nothing to read off.
    curves: {name: [(GPUs, tokens/s, efficiency)]}
    """
    fig, ax = figure(6.8, 3.2)
    for index, (name, curve) in enumerate(curves.items()):
        gpus, _, efficiency = zip(*curve)
        is_flat = min(efficiency) > 0.98
        line(ax, gpus, efficiency, index, name, **{"marker": "", "lw": 1.2} if is_flat else {})
        if is_flat:
            ax.annotate(f"{name}: {efficiency[-1]:.1%}", (gpus[-1], efficiency[-1]), (0, 5),
                        textcoords="offset points", ha="right", fontsize=9)
        for x, y in zip(gpus[1:], efficiency[1:]) if not is_flat else ():
            ax.annotate(f"{y:.0%}", (x, y), (-4, -7), textcoords="offset points", ha="right",
                        va="top", fontsize=9)
        if not is_flat:
            ax.annotate(name, (gpus[-3], efficiency[-3]), (8, 4), textcoords="offset points",
                        fontsize=9)
    counts = [each[0] for each in next(iter(curves.values()))]
    ax.set_xscale("log", base=2)
    ax.set_xticks(counts, [f"{count:,}" for count in counts])
    ax.set_ylim(0, 1.12)
    ax.set_xlabel("GPUs")
    ax.set_ylabel("tokens/s per GPU,\nrelative to the fewest")
    ax.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    least, name = min((curve[-1][2], name) for name, curve in curves.items())
    if title is None:
        title = f"{name.capitalize()}: on {counts[-1]:,} GPUs each has {least:.0%} of its speed " \
                f"on {counts[0]}"
    ax.set_title(title)
    return fig


@styled
def fp8(gains, faster, title=None):
    """Draw the published gain of FP8 over the share of a step that FP8 speeds up, below Amdahl's
    law.

    gains: [(share, published gain, name)]
    faster: how many times as fast the products are
    """
    fig, ax = figure(6.4, 3.6)
    shares = [each / 100 for each in range(101)]
    line(ax, shares, [1 / (1 - share + share / faster) for share in shares], 0,
         "Amdahl's law", marker="")
    ax.axhline(faster, color=INK, linewidth=0.8, linestyle=":")
    ax.annotate(f"the products alone: {faster:.2f}", (0, faster), (4, -11),
                textcoords="offset points", fontsize=9)
    for index, name in enumerate(dict.fromkeys(name for *_, name in gains), 1):
        points = [(share, gain) for share, gain, run in gains if run == name]
        ax.plot(*zip(*points), MARKERS[index % 5], color=TONES[index % 5], label=name)
    best = max(gain for _, gain, _ in gains)
    if title is None:
        title = f"FP8 speeds up only the products: published steps are {best:.2f} times as fast " \
                "at most"
    ax.set(xlim=(0, 1), ylim=(0.7, faster + 0.1), title=title,
           xlabel="products of the layers, share of a step in bf16",
           ylabel="how many times\nas fast with FP8")
    ax.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


@styled
def domains(curves, title=None):
    """Draw the seconds of the experts' all-to-alls in a step over the ranks that share the experts.

    curves: {what NVLink joins: [(ranks, seconds)]}
    """
    fig, ax = figure(6.4, 3.2)
    for index, (name, curve) in enumerate(curves.items()):
        ranks, seconds = zip(*curve)
        line(ax, ranks, seconds, index, name)
        ax.annotate(human_seconds(seconds[-1]), (ranks[-1], seconds[-1]), (6, 0),
                    textcoords="offset points", va="center", fontsize=9)
    if title is None:
        last = [curve[-1][1] for curve in curves.values()]
        title = (f"Experts on {ranks[-1]} ranks: the network makes all-to-alls "
                 f"{max(last) / min(last):.0f} times as long")
    ax.set_xscale("log", base=2)
    ax.set_xticks(ranks, ranks)
    ax.set_xlim(ranks[0] / 1.2, 1.5 * ranks[-1])
    ax.set_ylim(0)
    ax.set(title=title, xlabel="ranks that share the experts",
           ylabel="seconds of all-to-alls\nin a step, none hidden")
    ax.legend(loc="upper left")
    return fig


@styled
def frontier(layouts, room):
    """Draw a dot for each layout: the time of a step against memory, and the frontier of each tool.

    A frontier is a line through the layouts that no other layout of the tool beats in both.
    layouts: from planner.search_layouts, the fastest first
    room: bytes of a GPU
    """
    fig, ax = figure(7.6, 4.6)
    for index, tool in enumerate(dict.fromkeys(each.plan.tool for each in layouts)):
        group = [each for each in layouts if each.plan.tool == tool]
        ax.scatter([each.memory.total for each in group], [each.step.total for each in group], 7,
                   color=TONES[index % 5], alpha=0.25, linewidths=0, rasterized=True)
        edge = best_of_both(group)
        line(ax, [each.memory.total for each in edge], [each.step.total for each in edge], index,
             f"{tool}: {min(group, key=rank).plan.words()}", markersize=4, linewidth=1.2)
    ax.axvline(room, color=INK, linewidth=0.8, linestyle=":")
    low, high = 0.9 * layouts[0].step.total, 2.5 * layouts[0].step.total
    count = sum(each.step.total > high for each in layouts)
    ax.set(xlabel="memory of the fullest GPU", xlim=(0, 1.03 * room), ylim=(low, high),
           ylabel=f"step time\n(not from 0; {count:,} slower layouts lie above)",
           title=f"{len(layouts):,} layouts fit; the fastest takes "
                 f"{human_seconds(layouts[0].step.total)} for a step")
    bytes_axis(ax.xaxis)
    seconds_axis(ax.yaxis)
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.2), title="the best of each tool",
              title_fontsize=9, alignment="left")
    return fig


def best_of_both(layouts):
    """Return the layouts that take less memory than all faster ones, the fastest first.

    layouts: sorted, the fastest first
    """
    best = []
    for each in layouts:
        if not best or each.memory.total < best[-1].memory.total:
            best.append(each)
    return best


@styled
def offered(offers, budget=None, deadline=None):
    """Draw dollars against days, with a dot for each number of GPUs.

    If no price is known, GPU hours replace dollars.
    offers: from planner.offers.offers
    """
    fig, ax = figure(7.6, 3.4)
    priced = offers[0].bill.dollars is not None
    costs = [each.bill.dollars if priced else each.bill.gpu_hours for each in offers]
    days = [each.bill.days for each in offers]
    line(ax, days, costs, 0, "")
    (slow, few), (fast, many) = max(zip(days, costs)), min(zip(days, costs))
    for each, x, y in zip(offers, days, costs):
        ax.annotate(f"{each.layout.plan.gpus:,}", (x, y), (4, 6), textcoords="offset points",
                    fontsize=9)
    for value, draw, words, dashes in ((deadline, ax.axvline, "deadline", "--"),
                                       (budget, ax.axhline, "budget", ":")):
        if value:
            draw(value, color=TONES[1], linestyle=dashes, linewidth=1.4, label=words)
    ax.set(xlabel="days, failures included (log scale)", xscale="log",
           title=f"{fast:.3g} days instead of {slow:.3g}, for {many / few:.0%} of the cost",
           ylabel="dollars" if priced else "GPU hours", ylim=(0, 1.15 * max(*costs, budget or 0)))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.legend(handles=ax.lines[1:])
    return fig
