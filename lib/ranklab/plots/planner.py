"""The figures of `ranklab plan`: time against memory, and dollars against days."""

from ranklab.planner.search import simplest
from ranklab.plots.style import INK, TONES, bytes_axis, figure, line, seconds_axis, styled


@styled
def frontier(found, room, title="Every layout that fits: a step's time against memory"):
    """Each layout as a dot, and as a line for each tool those that no other beats in both.

    found  of planner.search_layouts, the fastest first
    room   bytes of a GPU
    """
    fig, ax = figure(7.6, 4.6)
    for index, tool in enumerate(dict.fromkeys(each.plan.tool for each in found)):
        mine = [each for each in found if each.plan.tool == tool]
        ax.scatter([each.memory.total for each in mine], [each.step.total for each in mine], 7,
                   color=TONES[index % 5], alpha=0.25, linewidths=0, rasterized=True)
        edge = best_of_both(mine)
        line(ax, [each.memory.total for each in edge], [each.step.total for each in edge], index,
             f"{tool}: {simplest(mine).plan.words()}", markersize=4, linewidth=1.2)
    ax.axvline(room, color=INK, linewidth=0.8, linestyle=":")
    ax.set(xlabel="memory of the fullest GPU", ylabel="a step", title=title,
           xlim=(0, 1.03 * room), ylim=(0.9 * found[0].step.total, 2.5 * found[0].step.total))
    bytes_axis(ax.xaxis)
    seconds_axis(ax.yaxis)
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.2), title="the best of each tool",
              title_fontsize=9, alignment="left")
    return fig


def best_of_both(found):
    """Those that have less memory than all that are faster; the fastest first."""
    kept = []
    for each in found:
        if not kept or each.memory.total < kept[-1].memory.total:
            kept.append(each)
    return kept


@styled
def offered(offers, budget=None, deadline=None, title="What more GPUs cost, and what they save"):
    """Dollars against days (GPU hours, where no price is known), a dot for each number of GPUs.

    offers  of planner.wish.offers
    """
    fig, ax = figure(7.6, 3.4)
    priced = offers[0].bill.dollars is not None
    costs = [each.bill.dollars if priced else each.bill.gpu_hours for each in offers]
    days = [each.bill.days for each in offers]
    line(ax, days, costs, 0, "")
    for each, x, y in zip(offers, days, costs):
        ax.annotate(f"{each.found.plan.gpus:,}", (x, y), (4, 6), textcoords="offset points",
                    fontsize=9)
    for value, draw, words, dashes in ((deadline, ax.axvline, "deadline", "--"),
                                       (budget, ax.axhline, "budget", ":")):
        if value:
            draw(value, color=TONES[1], linestyle=dashes, linewidth=1.4, label=words)
    ax.set(xlabel="days, failures included (log scale)", xscale="log", title=title,
           ylabel="dollars" if priced else "GPU hours", ylim=(0, 1.15 * max(*costs, budget or 0)))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.legend(handles=ax.lines[1:])
    return fig
