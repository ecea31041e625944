"""The figures of lab 05: when tensors are ready, which are fused, where the time goes."""

from collections import Counter

import torch
from matplotlib.ticker import LogLocator

from ranklab.horovod import fuse_tensors
from ranklab.horovod.cost import fused_time
from ranklab.plots.boxes import arrow, box
from ranklab.plots.gantt import Span, gantt
from ranklab.plots.style import (
    DASHES, FAINT, INK, TONES, bytes_axis, clean, figure, human_seconds, line, look, seconds_axis,
    styled,
)

PALE = "#dbe4ec"
# The time at which each gradient is ready on each rank, in the opening picture; and what follows.
READY = {"rank 0": {"d": 0, "c": 1, "b": 2, "a": 3.1},
         "rank 1": {"c": 0, "d": 1.4, "a": 2.7, "b": 5},
         "rank 2": {"d": 0.6, "b": 1.7, "c": 3.2, "a": 5.2}}  # fmt: skip
ROUNDS = {4.1: "cd", 6.0: "ba"}  # tensors that all ranks have by then, and did not have before

# The phases of a timeline to draw, by the ends of their names, and their look.
PHASES = {"NEGOTIATE_ALLREDUCE": ("negotiation", {"facecolor": FAINT}),
          "MEMCPY_IN_FUSION_BUFFER": ("copy in", look(2)), "_ALLREDUCE": ("all-reduce", look(0)),
          "MEMCPY_OUT_FUSION_BUFFER": ("copy out", look(1))}


@styled
def opening(title="Only what all ranks have is reduced, and in one buffer"):
    """Draw gradients, ready in a different order on each rank, fused once all ranks have them."""
    fig, ax = figure(8.4, 3.1)
    clean(ax)
    ax.set(xlim=(-1.3, 12.2), ylim=(3.15, -1.15))
    if title:
        ax.set_title(title)
    ax.text(2.6, -0.95, "backward makes gradients, on each rank in an order of its own",
            ha="center", va="center", fontsize=9)
    for y, (rank, ready) in enumerate(READY.items()):
        ax.text(-0.5, y, rank, ha="right", va="center")
        ax.plot((-0.3, 6.2), (y, y), color=FAINT, lw=1, zorder=0)
        for name, x in ready.items():
            _gradient(ax, x, y, name, is_first=name in "cd")
    for number, (x, names) in enumerate(ROUNDS.items()):
        y = 0.2 + 1.6 * number
        ax.plot((x, x), (-0.5, 2.5), color=INK, lw=1, ls=DASHES[1])
        ax.text(x, 2.8, f"round {number + 1}", ha="center", va="center", fontsize=9)
        ax.text(8.05, y - 0.55, f"round {number + 1}: all have {' and '.join(names)}", va="center",
                fontsize=9)
        for i, name in enumerate(names):
            _gradient(ax, 8.4 + i * 0.62, y, name, is_first=number == 0)
        ax.text(8.09, y + 0.52, "fusion buffer", ha="left", va="center", fontsize=9)
        arrow(ax, (9.4, y), (10.2, y))
        ax.text(10.35, y, "one\nall-reduce", ha="left", va="center", fontsize=9)
    arrow(ax, (6.35, 1), (7.75, 1))
    ax.text(7.05, 0.75, "negotiate", ha="center", va="center", fontsize=9)
    return fig


def _gradient(ax, x, y, name, is_first):
    first = {"fill": TONES[0], "ink": "white", "edge": "white"}
    box(ax, x, y, name, **(first if is_first else {"fill": PALE}))


@styled
def timeline(phases, title=None):
    """Draw a row for each all-reduce with its phases, and a tick where each gradient is ready.

    `phases` are (tensor, phase, start, end) of one step, from horovod.trace. Gradients whose
    all-reduces overlap were fused into one.
    """
    origin = min(phase[2] for phase in phases)
    of_tensor = {}
    for tensor, name, start, end in phases:
        kind = next(filter(name.endswith, PHASES), None)
        of_tensor.setdefault(tensor, {})[kind] = start - origin, end - origin
    rows = _fused([each for each in of_tensor.values() if "_ALLREDUCE" in each])
    fig, ax = figure(8.2, 1.5 + 0.42 * len(rows))
    for kind, (label, looks) in PHASES.items():
        spans = [Span(row, min(starts), max(ends), label, 0.5) for row, fused in enumerate(rows)
                 for starts, ends in [tuple(zip(*(each[kind] for each in fused if kind in each)))
                                      or ((0,), (0,))]]
        gantt(ax, spans, looks={label: looks}, lw=0, label=label)
    requests = [(row, *each["NEGOTIATE_ALLREDUCE"]) for row, fused in enumerate(rows)
                for each in fused if "NEGOTIATE_ALLREDUCE" in each]
    ax.plot([start for _, start, _ in requests], [row for row, *_ in requests], linestyle="none",
            marker="|", markersize=10, color=INK, markeredgewidth=1, label="ready")
    gantt(ax, [], {row: f"{len(fused)} gradient{'s' * (len(fused) > 1)}"
                   for row, fused in enumerate(rows)})
    travels = sum(max(each["_ALLREDUCE"][1] for each in fused)
                  - min(each["_ALLREDUCE"][0] for each in fused) for fused in rows)
    longest = human_seconds(max((end - start for _, start, end in requests), default=0))
    ax.set(xlabel="time since the first gradient of this step was ready",
           ylim=(len(rows) - 0.4, -0.6), title=title or
           f"Gradients wait up to {longest} for other ranks; {len(rows)} all-reduces take "
           f"{human_seconds(travels)}")
    seconds_axis(ax.xaxis)
    fig.legend(loc="outside lower center", ncols=5, columnspacing=1.2, handlelength=1.5)
    return fig


def _fused(tensors):
    """Group the tensors, each {kind: (start, end)}, by the all-reduce that carried them."""
    rows, last_end = [], None
    for each in sorted(tensors, key=lambda each: each["_ALLREDUCE"]):
        start, end = each["_ALLREDUCE"]
        if last_end is None or start >= last_end:
            rows.append([])
            last_end = end
        rows[-1].append(each)
    return rows


@styled
def fusion(sizes, thresholds, ranks, alpha, beta, fuse=fuse_tensors, title=None):
    """Draw the number of all-reduces, and their time by the model, against the fusion threshold.

    The gradients, of `sizes` bytes, are ready at once.
    fuse: fuse_tensors, or a learner's own
    title: the model's assumptions: ranks, latency, bandwidth
    """
    tensors = [torch.empty(n, dtype=torch.uint8, device="meta") for n in sizes]
    seconds = [fused_time(sizes, threshold, ranks, alpha, beta) for threshold in thresholds]
    fig, (left, right) = figure(8.2, 3.1, cols=2)
    line(left, thresholds, [len(fuse(tensors, each)) for each in thresholds], 0,
         "all ready at once", marker="")
    left.set_title("all ready at once")
    left.set(ylabel="all-reduces in a step", ylim=(0, None))
    line(right, thresholds, seconds, 0, None, marker="")
    right.set(ylabel="time of all, by the model", ylim=(0, None))
    seconds_axis(right.yaxis)
    for ax in (left, right):
        ax.set(xlabel="fusion threshold", xscale="log")
        bytes_axis(ax.xaxis)
    if title:
        right.set_title(title)
    return fig


@styled
def searches(runs):
    """Draw the thresholds that a tuner measured, on the curve of each workload.

    `runs`: (NoisySteps, chosen) for each workload
    """
    fig, axes = figure(8.2, 2.9, cols=len(runs))
    for ax, (steps, chosen) in zip(axes, runs):
        workload = steps.workload
        grid = workload.grid()
        line(ax, grid, [workload.score(x) for x in grid], 0, "no noise", marker="")
        counts = Counter(steps.asked)
        for threshold, calls in counts.items():
            ax.plot(threshold, workload.score(threshold), "o", color=TONES[1], alpha=0.7,
                    markersize=2 + calls**0.5)
        ax.axvline(chosen, color=INK, lw=1, ls=DASHES[1])
        ax.set(xscale="log", xlabel="fusion threshold", title=f"best {workload.kind}")
        bytes_axis(ax.xaxis)
        ax.xaxis.set_major_locator(LogLocator(numticks=4))
    axes[0].set_ylabel("step, in times of the best")
    worst = max(steps.workload.score(chosen) for steps, chosen in runs)
    fig.suptitle(f"The chosen thresholds (dashed) cost at most {worst - 1:.0%} more than the best")
    return fig
