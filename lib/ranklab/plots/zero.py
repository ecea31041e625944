"""The figures of lab 06: what each stage holds, which rank owns what, what is whole, and Muon."""

import math
from typing import NamedTuple

import numpy as np
from matplotlib.patches import Patch, Rectangle

from ranklab.formulas.muon import muon_owners
from ranklab.formulas.zero import zero_memory
from ranklab.plots.gantt import Span, boxed, gantt
from ranklab.plots.style import (
    FAINT, INK, bars, bytes_axis, clean, figure, human_bytes, look, styled,
)

# Categories of a MemoryCurve: (label, fields of a Memory, number of tone and hatching)
LAYERS = (
    ("parameters", ("parameters", "buffers"), 0), ("optimizer state", ("optimizer_state",), 2),
    ("gradients", ("gradients", "communication_buffers"), 1),
    ("gathered", ("gathered_parameters",), 3), ("activations", ("activations",), 4),
)


@styled
def states(parameters, ranks, gpu_bytes=80e9, with_totals=True):
    """Draw the bytes of each stage by zero_memory as stacked bars, and a GPU's memory as a line."""
    held = np.array([zero_memory(stage, parameters, ranks) for stage in range(4)])
    totals = held.sum(axis=1)
    names = ["data parallel", "stage 1", "stage 2", "stage 3"]
    fig, ax = figure(7, 3.2)
    for index, name in enumerate(("parameters", "gradients", "optimizer state")):
        bars(ax, names, held[:, index], index, name, bottom=held[:, :index].sum(axis=1), width=0.55)
    for x, total in enumerate(totals if with_totals else ()):
        ax.text(x, total, human_bytes(total), ha="center", va="bottom", fontweight="bold")
    ax.axhline(gpu_bytes, color=INK, ls="--", lw=1.2)
    ax.text(3.5, gpu_bytes, f"a GPU of {human_bytes(gpu_bytes)}", ha="right", va="bottom",
            fontsize=9)
    fits = next((f"{name} is the first that fits" for name, total in zip(names, totals)
                 if total <= gpu_bytes), "no stage fits")
    ax.set(title=f"{parameters / 1e9:g} billion parameters on {ranks} GPUs: {fits}",
           ylim=(0, 1.14 * max(*totals, gpu_bytes)),
           ylabel="bytes (bf16, Adam)")
    bytes_axis(ax.yaxis)
    ax.grid(axis="x", visible=False)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    return fig


@styled
def shards(sizes, ranks):
    """Draw parameters above and shards below, whose boundaries differ; `sizes` is {name: numbers}.
    """
    n = sum(sizes.values())
    each = math.ceil(n / ranks)
    fig, ax = figure(7.5, 2.2)
    starts = np.cumsum([0, *sizes.values()])
    cells = {Span(0, start, start + size, index % 2, 0.7): f"{name}\n{size}"
             for index, (start, (name, size)) in enumerate(zip(starts, sizes.items()))}
    cells |= {Span(1, rank * each, (rank + 1) * each, 2 + rank % 2, 0.7): f"rank {rank}\n{each}"
              for rank in range(ranks)}
    gantt(ax, cells, {0: "parameters", 1: "shards"})
    cut = sum(start // each != (end - 1) // each for start, end in zip(starts, starts[1:]))
    labels = []  # parts too small for their label
    for cell, text in cells.items():
        middle = (cell.start + cell.end) / 2
        if cell.row or cell.end - cell.start > 0.12 * each * ranks:
            boxed(ax, middle, cell.row, text, pad=1, fontsize=9)
        else:
            labels.append((middle, text.replace("\n", ": ")))
    if each * ranks > n:
        ax.barh(0, each * ranks - n, 0.7, n, facecolor="white", edgecolor=INK, hatch="xxx")
        labels.append(((n + each * ranks) / 2, "zeros"))
    for number, (middle, text) in enumerate(labels):
        ax.annotate(text, (middle, -0.36), (0, 4 + 13 * (number % 2)), ha="center", va="bottom",
                    textcoords="offset points", fontsize=9,
                    arrowprops={"arrowstyle": "-", "color": INK, "lw": 0.8, "shrinkB": 0})
    for border in range(each, ranks * each, each):
        ax.plot((border, border), (-0.45, 1.45), color=INK, ls="--", lw=1.2)
    ax.set(xlim=(0, each * ranks), ylim=(1.5, -1), xlabel="place in flat (numbers)",
           title=f"{cut} of {len(sizes)} parameters lie on more than one rank",
           xticks=[rank * each for rank in range(ranks + 1)])
    ax.grid(False)
    return fig


@styled
def memory_curves(curves, setting=None):
    """Draw the memory over a step, stacked, in a panel for each curve.

    `curves` is {name: MemoryCurve}. A panel is divided at the curve's marks; each phase is as wide
    as its name, however many ops it has. The phase before the first mark is called "forward,
    backward". `setting`: the model.
    """
    fig, axes = figure(8.6, 3.4, cols=len(curves), sharey=True, squeeze=False)
    highest = max(curve.peak_bytes for curve in curves.values())
    for ax, (name, curve) in zip(axes[0], curves.items()):
        x, points = _phases(ax, curve)
        layers = [[sum(getattr(point, field) for field in fields) for point in points]
                  for _, fields, _ in LAYERS]
        for area, (_, _, index) in zip(ax.stackplot(x, layers), LAYERS):
            area.set(**look(index), linewidth=0)
        ax.axhline(curve.peak_bytes, color=INK, lw=1, ls=":")
        ax.set_title(f"{name}\npeak {human_bytes(curve.peak_bytes)}", fontsize=10)
        ax.set(xlim=(x[0], x[-1]), ylim=(0, 1.04 * highest))
        bytes_axis(ax.yaxis)
    axes[0][0].set_ylabel("bytes in use on rank 0")
    peaks = sorted((curve.peak_bytes, name) for name, curve in curves.items())
    (low, lean), *_, (high, rich) = peaks[:1] + peaks[-1:]
    fig.suptitle(f"{lean.capitalize()} needs {human_bytes(low)} at most, "
                 f"{rich} {human_bytes(high)}")
    handles = [Patch(**look(index), label=label) for label, _, index in LAYERS]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(LAYERS), columnspacing=1.2,
               handlelength=1.5, title=setting, title_fontsize=9)
    return fig


def _phases(ax, curve, most=50):
    """Return (x, points) to draw, at most `most` in a phase: the highest of neighbouring points.
    Dotted lines are at the marks, with names between them.
    """
    marks = curve.marks
    if not marks or marks[0][0] > 1:
        marks = [(0, "forward, backward"), *marks]
    places, names = zip(*marks)
    borders = np.cumsum([0, *map(len, names)])
    for border in borders[1:-1]:
        ax.axvline(border, color=INK, lw=0.8, ls=":")
    ax.set_xticks((borders[1:] + borders[:-1]) / 2, names, fontsize=7.5)
    ax.tick_params(axis="x", length=0)
    ax.grid(axis="x", visible=False)
    x, points = [], []
    for start, end, left, right in zip(places, [*places[1:], len(curve.points)], borders,
                                       borders[1:]):
        parts = [part for part in np.array_split(curve.points[start:end], most) if len(part)]
        x += list(np.linspace(left, right, len(parts)))
        points += [max(part, key=lambda point: point.total) for part in parts]
    return x, points


class Work(NamedTuple):
    """One piece of a step: an action on a unit, or a time in which something is whole."""

    kind: str  # forward, backward, step; gather, reduce; weights, gradients
    unit: int
    start: float
    end: float


def one_step(stage, units=4, forward=1.0, send=0.7, step=0.25):
    """Model one step; return its Works.

    The network sends one unit at a time, in `send` seconds; backward takes twice as long as
    forward. Stage 0 and units that are always whole are left out.
    """
    order = [("forward", u) for u in range(units)]
    order += [("backward", u) for u in reversed(range(units))]
    is_sharded = stage == 3
    works = [Work("gather", 0, 0, send)] if is_sharded else []
    now, arrived = 0, send * is_sharded
    link = arrived  # until when it is busy
    for place, (kind, u) in enumerate(order):
        now, gathered = max(now, arrived), arrived - send
        finish = now + forward * (2 if kind == "backward" else 1)
        works.append(Work(kind, u, now, finish))
        if is_sharded:
            works.append(Work("weights", u, gathered, finish))
            for _, following in order[place + 1 : place + 2]:
                # the last unit of forward is freed, and gathered again
                arrived = link = max(finish if following == u else now, link) + send
                works.append(Work("gather", following, link - send, link))
        if kind == "backward":
            link = max(finish, link) + send
            works.append(Work("reduce", u, link - send, link))
        now = finish
    end = link + step
    works.append(Work("step", 0, link, end))
    if not is_sharded:
        works += [Work("gather", u, end + u * send, end + (u + 1) * send) for u in range(units)]
        end += units * send
        works += [Work("weights", u, 0, end) for u in range(units)]
    return works + _gradients(works, end if stage == 1 else None)


def _gradients(works, end):
    """Return how long gradients are whole: until `end`, or until the next unit's are computed."""
    reduces = [work for work in works if work.kind == "reduce"]
    starts = {work.unit: work.start for work in works if work.kind == "backward"}
    following = [*(work.start for work in reduces[1:]), 0]
    return [Work("gradients", work.unit, starts[work.unit], end or max(work.end, limit))
            for work, limit in zip(reduces, following)]


LANES = {"forward": 0, "backward": 0, "step": 0, "gather": 1, "reduce": 1}
INDEX = {"forward": 3, "backward": 4, "step": 2, "reduce": 1, "gather": 0,  # tone and hatching
         "gradients": 1, "weights": 0}


@styled
def unit_timeline(stages=(1, 2, 3), title=None):
    """Draw computation, messages, and what is whole, in one_step of each of the stages."""
    steps = [one_step(stage) for stage in stages]
    fig, axes = figure(8.2, 1.5 * len(steps) + 0.8, rows=len(steps), sharex=True, squeeze=False)
    end = max(work.end for works in steps for work in works)
    units = 1 + max(work.unit for work in steps[0])
    for ax, stage, works in zip(axes[:, 0], stages, steps):
        thin = 1.4 / (1 + max(work.unit for work in works))
        gantt(ax, [_life(work, thin) for work in works if work.kind not in LANES],
              {0: "computes", 1: "sends", 2.25: "is whole"}, lw=0)
        gantt(ax, [Span(LANES[work.kind], work.start, work.end, INDEX[work.kind], 0.8)
                   for work in works if work.kind in LANES], lw=0.5)
        for work in works:
            if work.kind in LANES and work.kind != "step":
                boxed(ax, (work.start + work.end) / 2, LANES[work.kind], work.unit + 1, pad=0.6,
                      fontsize=7)
        ax.axhline(1.47, color=FAINT, lw=1)
        ax.set_title(f"stage {stage}", loc="left", fontsize=10)
        ax.set(xlim=(0, end), ylim=(3, -0.5))
        ax.set_xticks([])
    axes[-1][0].set_xlabel("time (the numbers are those of the units)")
    whole = [_most_whole(works) for works in steps]
    if title is None:
        title = f"Of {units} units, stage {stages[0]} holds {whole[0]} whole, stage {stages[-1]} " \
                f"at most {whole[-1]} at a time (a schematic)"
    fig.suptitle(title)
    words = {"reduce": "reduce; whole gradients", "gather": "gather; whole weights"}
    handles = [Patch(**look(INDEX[kind]), label=words.get(kind, kind))
               for kind in ("forward", "backward", "step", "reduce", "gather")]
    fig.legend(handles=handles, loc="outside lower center", ncols=5, columnspacing=1.2,
               handlelength=1.5)
    return fig


def _most_whole(works):
    """Return the largest number of units whose weights are whole at one time."""
    lives = [(work.start, work.end) for work in works if work.kind == "weights"]
    return max(sum(start <= moment < end for start, end in lives) for moment, _ in lives)


def _life(work, thin):
    """Return the line that shows how long something is whole: there are two for each unit."""
    row = 1.6 + thin * (work.unit + (0.2 if work.kind == "weights" else 0.65))
    return Span(row, work.start, work.end, INDEX[work.kind], 0.42 * thin)


@styled
def muon_exchange(shapes, ranks, title="Newton-Schulz needs all rows of a matrix"):
    """Draw matrices in rows on their ranks, then whole on their owners, then in rows again."""
    fig, ax = figure(8.2, 3.4)
    clean(ax)
    widest, owners = max(n for _, n in shapes), muon_owners(shapes, ranks)
    gap, heights = 0.18 * max(m for m, _ in shapes), [m for m, _ in shapes]
    tops = [sum(heights[:i]) + gap * i for i in range(len(shapes))]
    lefts = [0, 1.9 * widest, 3.8 * widest]
    for (m, n), top, owner in zip(shapes, tops, owners):
        for left in lefts:
            x = left + (widest - n) / 2
            if left == lefts[1]:
                ax.add_patch(Rectangle((x, top), n, m, **look(owner)))
                boxed(ax, x + n / 2, top + m / 2, f"rank {owner}", pad=1, fontsize=9)
                continue
            row = top
            for rank in range(ranks):
                size = m // ranks + (rank < m % ranks)
                ax.add_patch(Rectangle((x, row), n, size, **look(rank)))
                if size:
                    boxed(ax, x + n / 2, row + size / 2, rank, pad=0.6, fontsize=7)
                row += size
        for left, text in zip(lefts, ("rows", "orthogonal rows")):
            ax.annotate("", (left + 1.8 * widest, top + m / 2), (left + 1.1 * widest, top + m / 2),
                        arrowprops={"arrowstyle": "->", "color": INK, "lw": 1.4})
            ax.text(left + 1.45 * widest, top + m / 2 - 0.1 * gap, text, ha="center", va="bottom",
                    fontsize=8)
    bottom = tops[-1] + heights[-1]
    for left, text in zip(lefts, (f"the momentum, in rows of {ranks} ranks",
                                  "whole on one owner: newton_schulz", "the update, in rows")):
        ax.text(left + widest / 2, bottom + 0.5 * gap, text, ha="center", va="top", fontsize=9)
    ax.set(xlim=(-0.3 * widest, 5.1 * widest), ylim=(bottom + 2 * gap, -0.3 * gap), title=title)
    return fig
