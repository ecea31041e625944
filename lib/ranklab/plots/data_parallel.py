"""The figures of lab 03: what data parallelism is, what is sent when, what each piece does."""

import statistics

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullFormatter

from ranklab.plots.boxes import arrow, box
from ranklab.plots.gantt import Span, boxed, gantt, kinds_below, merged
from ranklab.plots.style import FAINT, HATCHES, INK, TONES, clean, figure, line, styled

SHARES = ("#dbe4ec", "#8fa9c4", "#4f7396", "#12355b")  # a rank's part of the batch: its shade


@styled
def replicas(ranks=4, images=8, title="Between replicas only gradients travel"):
    """Draw one process and `ranks` replicas, from batch to step: what is split, and what is not."""
    fig, ax = figure(8.2, 0.62 * ranks + 1.9)
    clean(ax)
    each, bottom = images // ranks, ranks + 0.75  # rows: 0 for one process, the ranks from 1.75
    for x, heading in ((2, "batch"), (6.2, "forward, backward"), (9.2, "gradient"), (11.4, ""),
                     (13.9, "step")):  # fmt: skip
        ax.text(x, -0.85, heading, ha="center", fontweight="bold")
    for row, rank in [(0, None), *((1.75 + r, r) for r in range(ranks))]:
        name = "one process" if rank is None else f"rank {rank}"
        ax.text(-0.35, row, name, ha="right", va="center", fontweight="bold")
        for i in range(images):
            if rank is None or i // each == rank:
                ax.add_patch(Rectangle((i * 4 / images, row - 0.3), 4 / images, 0.6, lw=0.8,
                                       fc=SHARES[i // each % 4], ec="white"))  # fmt: skip
        box(ax, 6.2, row, "weights $w$", width=2.4, height=0.6, lw=0.9)
        text = "$g$" if rank is None else f"$g_{rank}$"
        box(ax, 9.2, row, text, "white" if rank is None else SHARES[rank % 4],
            "white" if rank is not None and rank % 4 > 1 else INK, 1.2, 0.6, lw=0.9)
        box(ax, 13.9, row, "$w - \\mathrm{lr} \\cdot g$", width=2.2, height=0.6, lw=0.9)
        last = [(9.9, 12.7)] if rank is None else [(9.9, 10.5), (12.2, 12.7)]  # by the all-reduce
        for start, end in [(4.15, 4.9), (7.5, 8.5), *last]:
            arrow(ax, (start, row), (end, row))
    ax.add_patch(Rectangle((10.55, 1.35), 1.6, ranks - 0.2, fc="#f0d6bd", ec=TONES[1], lw=1.5,
                           hatch=HATCHES[1]))  # fmt: skip
    boxed(ax, 11.35, 1.25 + ranks / 2, "all-reduce\nmean $= g$", pad=2)
    for x, text in ((2, "split"), (6.2, "the same weights,\nother images"),
                    (11.35, "all that\ntravels"), (13.9, "the same step,\nso the same weights")):
        ax.text(x, bottom + 0.7, text, ha="center", va="center", fontsize=9)
    ax.axhline(0.85, color=FAINT, lw=1)
    ax.set(xlim=(-2.4, 15.6), ylim=(bottom + 1.2, -1.1), title=title)
    return fig


@styled
def timeline(events_per_rank, title="Who computes, and what travels meanwhile"):
    """Draw a step on every rank: computation above, all-reduces below, numbered as they begin.

    `events_per_rank` has meter's events of each rank. Dark orange is exposed: this rank
    communicates, and computes nothing.
    """
    ranks = len(events_per_rank)
    start = min(event.start for events in events_per_rank for event in events)
    end = max(event.end for events in events_per_rank for event in events)
    span = 1e3 * (end - start)
    fig, ax = figure(8.2, 0.95 * ranks + 1.3)
    for rank, events in enumerate(events_per_rank):
        top = 2.7 * rank
        busy = merged([e for e in events if e.kind == "compute"], start, span / 2000)
        loading = merged([e for e in events if e.kind == "loader"], start, span / 2000)
        for kind, spans in (("loader", loading), ("compute", busy)):
            gantt(ax, [Span(top, a, b, kind, 0.8) for a, b in spans], lw=0.3)
        _phases(ax, events, start, top - 0.45)
        exposed = _all_reduces(ax, events, busy, start, span, top + 1)
        ax.text(1.01 * span, top + 1, f"{exposed:.3g} ms\nexposed", va="center", fontsize=9)
    gantt(ax, [], {2.7 * rank + lane: name for rank in range(ranks)
                   for lane, name in enumerate((f"rank {rank}  computes", "communicates"))})
    ax.set(xlim=(0, span), ylim=(2.7 * ranks - 1, -1.1), xlabel="ms", title=title)
    loads = any(event.kind == "loader" for events in events_per_rank for event in events)
    kinds_below(fig, {"compute": "computes", **({"loader": "loads"} if loads else {}),
                      "hidden": "all-reduce behind computing", "exposed": "all-reduce exposed"})
    return fig


@styled
def bucket_plans(plans, ready, setting=None):
    """Draw the all-reduces of each plan below the backward pass.

    `plans` is {name: [(start, end)]} in seconds. Backward ends at ready[-1]. Dark orange is
    exposed: backward has ended. A number counts the buckets. `setting`: the model and link.
    """
    fig, ax = figure(8.2, 0.5 * len(plans) + 1.5)
    limit = 1e3 * ready[-1]
    gantt(ax, [Span(0, 0, limit, "compute")])
    for row, times in enumerate(plans.values(), 1):
        for number, (start, end) in enumerate(times, 1):
            a, b = 1e3 * start, 1e3 * end
            gantt(ax, [Span(row, a, b, "hidden"), *([Span(row, max(a, limit), b, "exposed")]
                                                    if b > limit else [])])
            if b - a > 0.8:
                boxed(ax, (a + b) / 2, row, number, fontsize=8)
    gantt(ax, [], dict(enumerate(["backward", *plans])))
    ax.axvline(limit, color=INK, lw=1, ls=":")
    ax.set(ylim=(len(plans) + 0.6, -0.6), xlabel="ms" + (f" ({setting})" if setting else ""),
           title="; ".join(f"{name}: {max(0, 1e3 * times[-1][1] - limit):.1f} ms exposed"
                           for name, times in plans.items()))
    kinds_below(fig, {"compute": "computes", "hidden": "all-reduce behind computing",
                      "exposed": "all-reduce exposed"})  # fmt: skip
    return fig


def _phases(ax, events, start, y):
    """Label the starts of forward, backward and the optimizer above one rank's computation."""
    computing = sorted((e.start, e.end, e.name) for e in events if e.kind == "compute")
    backward = [begin for begin, _, name in computing if "backward" in name.lower()]
    arrival = max((e.end for e in events if e.kind == "communication"), default=None)
    begins = {"forward": computing[0][0]} if computing and backward else {}
    if backward:
        begins["backward"] = backward[0]
    starts = [begin for begin, _, _ in computing if arrival and begin >= arrival]
    if starts and backward:
        begins["step"] = starts[0]
    for name, begin in begins.items():
        x = 1e3 * (begin - start)
        ax.plot((x, x), (y - 0.35, y + 0.9), color=INK, lw=0.9)
        ax.text(x, y - 0.08, f" {name}", fontsize=8.5, va="bottom")


def _all_reduces(ax, events, busy, start, span, y):
    """Draw the messages of one rank, in as many thin rows as run at once; return the exposed ms."""
    messages = sorted((e for e in events if e.kind == "communication"), key=lambda e: e.start)
    lanes = list(dict.fromkeys(e.lane for e in messages))
    height = 0.8 / max(1, len(lanes))
    for number, event in enumerate(messages, 1):
        a, b = 1e3 * (event.start - start), 1e3 * (event.end - start)
        row = y - 0.4 + height * (lanes.index(event.lane) + 0.5)
        gantt(ax, [Span(row, a, b, "hidden", height),
                   *(Span(row, c, d, "exposed", height) for c, d in _without(a, b, busy))])
        if b - a > 0.03 * span:
            boxed(ax, (a + b) / 2, row, number, fontsize=8)
        else:
            ax.text(b, row, f" {number}", va="center", fontsize=7, clip_on=True)
    together = merged(messages, start, 0)
    return sum(d - c for a, b in together for c, d in _without(a, b, busy))


def _without(a, b, busy):
    """Return the parts of [a, b] outside all of `busy`."""
    for begin, end in busy:
        if begin >= b:
            break
        if end > a:
            if begin > a:
                yield a, begin
            a = end
    if a < b:
        yield a, b


@styled
def speed_up(seconds):
    """Draw the speed-up over one rank; `seconds` is {name: {ranks: seconds}}."""
    fig, ax = figure(7, 3.2)
    ranks = sorted({R for row in seconds.values() for R in row})
    line(ax, ranks, ranks, 3, "ideal", color=INK, marker="", linewidth=1.2)
    for index, (name, row) in enumerate(seconds.items()):
        times = [row[min(row)] / s for s in row.values()]
        line(ax, list(row), times, index, name)
        for R, faster in list(zip(row, times))[1:]:
            ax.annotate(f"{faster:.2f}", (R, faster), (0, 9 if index % 2 else -9), ha="center",
                        va="bottom" if index % 2 else "top", textcoords="offset points",
                        fontsize=9, color=TONES[index], fontweight="bold",
                        bbox={"fc": "white", "ec": "none", "pad": 0.5})  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(ranks, [f"{R} rank" + "s" * (R > 1) for R in ranks])
    ax.yaxis.set_major_formatter("{x:g}")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())
    best = max(row[min(row)] / row[ranks[-1]] for row in seconds.values() if ranks[-1] in row)
    ax.set(ylabel="speed-up over one rank", xlim=(ranks[0] / 1.15, ranks[-1] * 1.15),
           title=f"{ranks[-1]} ranks: at most {best:.1f} times as fast as one")
    ax.margins(y=0.12)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


@styled
def held_out_errors(results, title="Held-out errors, one point a seed"):
    """Draw the errors of rank 0's replica, and of the worst replica if that is a different one.

    results: {name or number of ranks: [Run of each seed]}; the range of the first is a grey band
    """
    fig, ax = figure(7, 0.38 * len(results) + 1.5)
    for row, runs in enumerate(results.values()):
        first, worst = ([100 * (1 - getattr(run, score)) for run in runs]
                        for score in ("accuracy", "worst"))
        if row == 0:
            ax.axvspan(min(first), max(first), color=FAINT, alpha=0.6, zorder=0)
        _range(ax, first, row - 0.16 * (first != worst), 0)
        if first != worst:
            _range(ax, worst, row + 0.2, 1)
    line(ax, [], [], 0, "rank 0's replica")
    line(ax, [], [], 1, "the worst replica")
    ax.set_yticks(range(len(results)), [f"{n} rank" + "s" * (n > 1) if isinstance(n, int) else n
                                        for n in results])  # fmt: skip
    ax.set_ylim(len(results) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.set_xscale("log")
    ticks = [1, 2, 3, 5, 10, 20, 30, 50, 90]
    ax.set_xticks(ticks, map(str, ticks))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set(xlabel="percent wrong (logarithmic)", title=title, xlim=(None, 100))
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def _range(ax, values, y, index):
    """Draw points at height y, their range as a line, and their mean as a tick."""
    line(ax, [min(values), max(values)], [y, y], index, None, marker="", linewidth=1.5)
    line(ax, values, np.full(len(values), y), index, None, linestyle="", alpha=0.75)
    mean = statistics.mean(values)
    ax.plot((mean, mean), (y - 0.16, y + 0.16), color=INK, lw=2)
