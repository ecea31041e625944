"""The figures of lab 01: memory, the roofline, and training curves."""

import numpy as np

from ranklab.baseline.roofline import attainable_flops
from ranklab.plots.gantt import Span, boxed, gantt
from ranklab.plots.style import (FAINT, INK, TONES, bars, bytes_axis, clean, figure, human_bytes,
                                 line, look, styled)  # fmt: skip


@styled
def hierarchy(device):
    """Draw the memory levels of `device`: the higher, the smaller and faster."""
    levels = device.levels()
    fig, ax = figure(6.6, 0.5 * len(levels) + 0.8)
    rates = [level.bandwidth for level in levels]
    for row, level in enumerate(levels):
        # widths grow with the logarithm of the size, which gives a pyramid
        width = 4.4 + 3.6 * row / max(1, len(levels) - 1)
        ax.barh(row, width, left=-width / 2, height=0.78, color=TONES[0], edgecolor="white",
                alpha=1 - 0.11 * row)  # fmt: skip
        size = "" if np.isinf(level.bytes) else f", {human_bytes(level.bytes)}"
        ax.text(0, row, f"{level.name}{size}", ha="center", va="center", fontweight="bold",
                fontsize=9, color="white" if row < 4 else INK)  # fmt: skip
        slower = f"   1/{rates[0] / level.bandwidth:,.0f}" if row else ""
        ax.text(4.3, row, f"{human_bytes(level.bandwidth)}/s{slower}", va="center", fontsize=9)
    ax.text(4.3, -0.75, "bandwidth (and as a part of the registers')", fontsize=9, va="center")
    ax.set(xlim=(-4.2, 7.8), ylim=(len(levels) - 0.45, -1.1),
           title=f"{device.name}: the {levels[-1].name} is {rates[0] / rates[-1]:,.0f} times "
                 f"slower than {levels[0].name}")  # fmt: skip
    clean(ax)
    return fig


@styled
def memory(table, title="Memory of one training step"):
    """Draw predicted and counted bytes by category; `table` is {category: (predicted, counted)}."""
    names = list(table)
    fig, ax = figure(7, 0.62 * len(names) + 1.1)
    rows = np.arange(len(names))
    for index, label in enumerate(("predicted", "counted")):
        sizes = [pair[index] or 0 for pair in table.values()]
        ax.barh(rows + (index - 0.5) * 0.36, sizes, 0.34, label=label, **look(index))
        for row, size in zip(rows, sizes):
            ax.text(size, row + (index - 0.5) * 0.36, f" {human_bytes(size)}", va="center",
                    fontsize=8)  # fmt: skip
    ax.set_yticks(rows, names)
    ax.set(title=title, xlim=(0, 1.15 * max(max(p, c or 0) for p, c in table.values())))
    bytes_axis(ax.xaxis)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.legend(loc="best")
    return fig


@styled
def activations(keeps, parts, model="one block"):
    """Draw the activations that a model keeps for backward, stacked by part.

    keeps: {bar: [bytes of each part]}
    model: a description of the model and its batch
    """
    fig, ax = figure(7, 3.4)
    bottom = np.zeros(len(keeps))
    for index, part in enumerate(parts):
        height = np.array([values[index] for values in keeps.values()], dtype=float)
        bars(ax, list(keeps), height, index, part, bottom=bottom, width=0.55)
        bottom += height
    for x, total in enumerate(bottom):
        ax.text(x, total, human_bytes(total), ha="center", va="bottom", fontsize=9)
    bytes_axis(ax.yaxis)
    first, *_, last = keeps
    ax.set(title=f"{first.capitalize()} keeps {bottom[0] / bottom[-1]:.0f} times as much as {last}",
           ylim=(0, 1.12 * bottom.max()), ylabel="kept for backward", xlabel=model)
    ax.grid(axis="x", visible=False)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    return fig


@styled
def live_bytes(curves):
    """Draw the bytes kept for backward over a step.

    `curves` is {label: (bytes in forward, bytes in backward)}.
    """
    fig, ax = figure(7, 3)
    peaks = []
    for index, (label, (forward, backward)) in enumerate(curves.items()):
        x = np.r_[np.linspace(0, 1, len(forward)), np.linspace(1, 3, len(backward))]
        peaks.append(human_bytes(max(*forward, *backward)))
        line(ax, x, forward + backward, index, f"{label}: peak {peaks[-1]}", marker="")
    ax.axvline(1, color=INK, linestyle=":", linewidth=1.5)
    bytes_axis(ax.yaxis)
    ax.set_xticks([0.5, 2], ["forward", "backward"])
    ax.tick_params(axis="x", length=0)
    ax.grid(axis="x", visible=False)
    ax.set(title=f"{label.capitalize()}: at most {peaks[-1]} wait for backward, not {peaks[0]}",
           ylim=(0, None), xlim=(0, 3), ylabel="activations in memory")
    ax.legend(loc="upper right")
    return fig


@styled
def roofline(operations, device, title=None):
    """Draw each operation at its intensity, under the roof of `device` (bf16)."""
    fig, ax = figure(7.5, 3.8)
    peak, bandwidth = device.bf16_flops, device.memory_bandwidth
    low = min(0.2, min(operation.intensity for operation in operations) / 2)
    x = np.geomspace(low, max(10 * device.balance, 3e3), 200)
    line(ax, x, [attainable_flops(i, peak, bandwidth) for i in x], 0, "roof", marker="")
    ax.axvline(device.balance, color=FAINT, linewidth=1.2, zorder=0)
    ax.text(device.balance, 2 * low * bandwidth, f"balance: {device.balance:.0f} FLOP/byte ",
            ha="right", fontsize=9)  # fmt: skip
    waiting = sum(each.intensity < device.balance for each in operations)
    legend, groups = [], []  # operations too close to be distinguished share a label
    for number, operation in enumerate(sorted(operations, key=lambda o: o.intensity), 1):
        if not groups or operation.intensity > 1.2 * groups[-1][0]:
            groups.append((operation.intensity, []))
        groups[-1][1].append(str(number))
        y = attainable_flops(operation.intensity, peak, bandwidth)
        line(ax, [operation.intensity], [y], 1, None, linestyle="", markersize=5, zorder=3,
             markerfacecolor="none")  # fmt: skip
        legend.append(f"{number}  {operation.name}: {operation.intensity:.3g}")
    for place, (intensity, numbers) in enumerate(groups):
        close = place and len(numbers) > 1 and intensity < 2 * groups[place - 1][0]
        ax.annotate(", ".join(numbers), (intensity, attainable_flops(intensity, peak, bandwidth)),
                    (0, -26 if close else -14), textcoords="offset points", ha="center",
                    fontsize=8)  # fmt: skip
    ax.text(1.02, 0.5, "FLOP per byte\n" + "\n".join(legend), transform=ax.transAxes, va="center",
            fontsize=8.5, linespacing=1.5)  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=(x[0], x[-1]), ylim=(None, peak * 2),
           xlabel="intensity (FLOP per byte of memory traffic)",
           ylabel="FLOP/s that can be reached",
           title=title or f"{waiting} of {len(operations)} operations wait for the memory "
                          f"of an {device.name}")  # fmt: skip
    return fig


@styled
def loss_curve(history, bigram, title="A GPT learns more than pairs of letters"):
    """Draw training and held-out loss over the steps, and the bigram model's loss as a baseline."""
    fig, ax = figure(7, 3.2)
    line(ax, history.steps, history.loss, 0, "training batch", marker="", linewidth=1.3)
    held_out = sorted(history.held_out.items())
    line(ax, *zip(*held_out), 1, "held out")
    last = held_out[-1]
    ax.annotate(f"{last[1]:.2f}", last, (0, 8), textcoords="offset points", ha="center",
                color=TONES[1], fontweight="bold")  # fmt: skip
    ax.axhline(bigram, color=INK, linestyle=":", linewidth=1.5)
    ax.text(history.steps[-1], bigram, f"bigram model, held out: {bigram:.2f} ", ha="right",
            va="bottom", fontsize=9)  # fmt: skip
    # the first steps, from ln 256 down, would flatten the rest
    low, high = min(last[1], *history.loss) - 0.2, bigram + 0.7
    ax.set(xlabel="step", ylabel="loss (nats per byte)", title=title, ylim=(low, high))
    ax.legend(loc="upper right")
    return fig


@styled
def scale_history(scales, skipped, large=()):
    """Draw the loss scale of each step, with marks at skipped steps and at `large` batches."""
    fig, ax = figure(7, 2.6)
    for place, step in enumerate(large):
        ax.axvline(step, color=FAINT, linewidth=5, zorder=0,
                   label=None if place else "batch with large gradients")  # fmt: skip
    line(ax, range(len(scales)), scales, 0, "loss scale", marker="", drawstyle="steps-mid")
    line(ax, skipped, [scales[step] for step in skipped], 1, "overflow: step skipped",
         linestyle="")  # fmt: skip
    ax.set(xlabel="step", ylabel="scale that the step used",
           title=f"Dynamic loss scaling: {len(skipped)} of {len(scales)} steps skipped")
    ax.set_yscale("log", base=2)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return fig


@styled
def arena(states, title="The same free bytes, in one piece and in pieces"):
    """Draw a memory map in each row, allocations dark, gaps empty; `states` is {label: Arena}."""
    fig, ax = figure(7, 0.62 * len(states) + 1.1)
    for row, (label, arena) in enumerate(states.items()):
        ax.barh(row, arena.size, height=0.6, color="white", edgecolor=INK)
        for index, (name, (start, size)) in enumerate(arena.pieces.items()):
            ax.barh(row, size, 0.6, start, **look(index % 2))
            boxed(ax, start + size / 2, row, name, pad=1, fontsize=8)
        ax.annotate(f"{arena.free_bytes} free\nlargest gap {arena.largest_gap}", (arena.size, row),
                    (8, 0), textcoords="offset points", va="center", fontsize=8.5)  # fmt: skip
    ax.set_yticks(range(len(states)), list(states))
    widest = max(arena.size for arena in states.values())
    ax.set(xlabel="address (bytes)", title=title, xlim=(0, widest))
    ax.invert_yaxis()
    ax.grid(False)
    return fig


@styled
def timeline(spans, title="Who works when"):
    """Draw rows of work over time; spans is {row: [(name, start, end)]} in seconds."""
    fig, ax = figure(7, 0.55 * len(spans) + 1.1)
    for row, works in enumerate(spans.values()):
        gantt(ax, [Span(row, 1e3 * start, 1e3 * end, index % 2)
                   for index, (_, start, end) in enumerate(works)], dict(enumerate(spans)))
        for name, start, end in works:
            boxed(ax, (start + end) / 2 * 1e3, row, name, pad=1, fontsize=8)
    ax.set(xlabel="ms", title=title)
    ax.invert_yaxis()
    return fig
