"""The figures of the deck 05_horovod.md."""
import math

import torch

from ranklab.horovod import adasum_of_two
from ranklab.horovod.cost import fused_time
from ranklab.plots import horovod as plots
from ranklab.plots.boxes import arrow
from ranklab.plots.style import DASHES, INK, TONES, clean, figure, line, seconds_axis, styled

MB, ms, us = 10**6, 1e-3, 1e-6


def _step(sizes, backward, cycle, ranks, copies, late=0.0):
    """A model of one step, not a measurement: gradients come evenly, the last rank is `late`
    seconds behind; what all have at the end of a cycle is fused, in copies of `copies` bytes a
    second, and reduced by a ring: 10 us a message, 10 GB/s.
    """
    ready = [backward * (i + 1) / len(sizes) for i in range(len(sizes))]
    phases, free, i = [], 0.0, 0
    while i < len(sizes):
        known = max(free, cycle * math.ceil((ready[i] + late) / cycle - 1e-9))
        group = [k for k in range(i, len(sizes)) if ready[k] + late <= known + 1e-9]
        copied = sum(sizes[k] for k in group) / copies
        reduced = fused_time([sizes[k] for k in group], 1024 * MB, ranks, 10 * us, 1 / 10e9)
        free = known + 2 * copied + reduced
        for k in group:
            name = f"gradient {k}"
            phases += [(name, "NEGOTIATE_ALLREDUCE", ready[k], known),
                       (name, "MEMCPY_IN_FUSION_BUFFER", known, known + copied),
                       (name, "NCCL_ALLREDUCE", known + copied, free - copied),
                       (name, "MEMCPY_OUT_FUSION_BUFFER", free - copied, free)]
        i += len(group)
    return phases


def orders():
    return plots.opening(title=""), 6.2, 2.5


def fusion():
    thresholds = [2**k for k in range(14, 28)]
    return plots.fusion([40_000] * 160, thresholds, 64, 10 * us, 1 / 10e9,
                        title="64 ranks, 10 us, 10 GB/s"), 5.75, 2.4


def _at_cycle(cycle):
    """(seconds in which all-reduces run, seconds from the end of backward to that of the last)."""
    phases = _step([MB] * 160, 80 * ms, cycle, 64, 100e9)
    runs = {(start, end) for _, phase, start, end in phases if phase == "NCCL_ALLREDUCE"}
    return sum(end - start for start, end in runs), phases[-1][3] - 80 * ms


@styled
def cycle():
    cycles = [c * ms for c in (0.5, 1, 2, 4, 8, 16, 40, 80)]
    fig, ax = figure(5.75, 2.4)
    busy, waits = zip(*map(_at_cycle, cycles))
    line(ax, cycles, busy, 0, "all-reduces, in all")
    line(ax, cycles, waits, 1, "wait after backward")
    ax.set(xlabel="cycle time", xscale="log", ylim=(0, None),
           title="160 x 1 MB in 80 ms of backward; 64 ranks, 10 us, 10 GB/s")
    for axis in (ax.xaxis, ax.yaxis):
        seconds_axis(axis)
    ax.legend()
    return fig


def _vector(ax, start, end, tone, dashes="-"):
    arrow(ax, start, end, arrowstyle="-|>", color=tone, lw=2, ls=dashes, shrinkA=0, shrinkB=0)


@styled
def adasum():
    fig, axes = figure(5.75, 2.3, cols=3, sharey=True)
    for ax, angle in zip(axes, (10, 60, 90)):
        clean(ax)
        half = math.radians(angle / 2)
        a, b = (torch.tensor([math.cos(t), math.sin(t)]) for t in (half, -half))
        _vector(ax, (0, 0), a, TONES[0])
        _vector(ax, (0, 0), b, TONES[0])
        ways = {"average": (a + b) / 2, "Adasum": adasum_of_two(a, b), "sum": a + b}
        for way, (name, vector) in enumerate(ways.items()):
            x, y = vector[0].item(), -1 - 0.42 * way
            _vector(ax, (0, y), (x, y), TONES[1] if name == "Adasum" else INK, DASHES[way])
            ax.text(x + 0.06, y, f"{name} {x:.2f}", va="center", fontsize=10)
        ax.set(xlim=(-0.05, 2.8), ylim=(-2, 0.8), aspect="equal", title=f"{angle} degrees")
    return fig


@styled
def _timeline(late, title):
    fig = plots.timeline(_step([4 * MB] * 16, 40 * ms, 5 * ms, 8, 10e9, late), title)
    ax = fig.axes[0]
    ax.set(xlim=(0, 90 * ms), xlabel="since the first gradient was ready")
    return fig, 5.75, 2.4


def healthy():
    return _timeline(0, "Every rank is in time: 16 x 4 MB, 8 ranks, a cycle of 5 ms")


def late():
    return _timeline(35 * ms, "One rank of eight is 35 ms late")
