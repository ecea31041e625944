"""The figures of lab 12: all layouts in one picture, bytes along each axis, boxes of a matrix."""

from ranklab.plots.boxes import box
from ranklab.plots.style import (
    FAINT, INK, TONES, bars, bytes_axis, clean, figure, human_bytes, styled,
)

HELD = {"parameters": "weights", "gradients": "gradients", "optimizer_state": "Adam"}
SAME = 0.0001  # losses that differ by less are the same
AXES = ("tensor", "data", "pipeline", "context", "expert")
GREYS = ("#3b444d", "#8a97a3", FAINT, "#a89f91", "#6d6156")  # axes; colours are kinds of memory
FILLS = ((TONES[0], "white"), ("#e39d62", INK), ("#cfdcc0", INK), (TONES[3], "white"),
         ("white", INK), ("#4aa3b5", INK), ("#8a97a3", INK), (FAINT, INK))  # of ranks, and text


@styled
def compared(rows):
    """Draw what a rank holds and sends in each layout, and the layout's loss if it is different.

    Each loss is compared with the first row, and the title says for how many it is the same. The
    losses themselves are not shown, because the text differs between Python versions.
    rows: from projects.hybrid.compare.compare
    """
    fig, (held, sent) = figure(9.6, 0.3 * len(rows) + 1.9, cols=2, sharey=True)
    axes = [axis for axis in AXES if any(axis in row["sent"] for row in rows)]
    for ax, key, names, xlabel, tones in (
            (held, "held", HELD, "bytes that a rank holds", TONES),
            (sent, "sent", dict(zip(axes, axes)), "bytes that it sends in a step, by axis", GREYS)):
        left = [0] * len(rows)
        for index, (name, label) in enumerate(names.items()):
            widths = [row[key].get(name, 0) for row in rows]
            bars(ax, range(len(rows)), widths, index, label, barh=True, left=left,
                 facecolor=tones[index])
            left = [a + b for a, b in zip(left, widths)]
        ax.set_xlabel(xlabel)
        bytes_axis(ax.xaxis)
        ax.grid(axis="y", visible=False)
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(names), handlelength=1.4,
                  columnspacing=1.2)
    held.set_yticks(range(len(rows)), [row["name"] for row in rows])
    held.set_ylabel("dp x tp x pp")
    held.invert_yaxis()
    count = 0
    for line, row in enumerate(rows):
        difference = row["loss"] - rows[0]["loss"]
        if abs(difference) >= SAME:
            count += 1
            sent.text(1.02, line, f"loss {difference:+.4f}", va="center", fontsize=9,
                      transform=sent.get_yaxis_transform())
    fig.suptitle(f"{count} of {len(rows)} layouts have another loss" if count else
                 f"{len(rows)} layouts hold and send different bytes, and have one loss "
                 f"(within {SAME})")
    return fig


@styled
def along_axes(traffic, mesh, per_node, setting=""):
    """Draw a bar for each axis: the bytes that a rank sends along it in a step.

    traffic: {axis: bytes}
    setting: the model
    """
    fig, ax = figure(7.6, 2.1)
    inside = mesh.axes_inside(per_node)
    for line, axis in enumerate(mesh.axes):
        bars(ax, [line], [traffic[axis]], int(axis not in inside), barh=True)
        place = "inside a node" if axis in inside else "between nodes"
        ax.annotate(f"{human_bytes(traffic[axis])}, {place}", (traffic[axis], line), (5, 0),
                    textcoords="offset points", va="center")
    ax.set_yticks(range(len(mesh.axes)), [f"{axis} {size}" for axis, size in mesh.axes.items()])
    (second, less), (most, more) = sorted(traffic.items(), key=lambda each: each[1])[-2:]
    title = f"A rank sends {more / less:,.0f} times as much along {most} as along {second}" \
        if less else f"A rank sends along {most} alone"
    ax.set(xlabel=f"bytes that a rank sends in a step {setting}", title=title,
           xlim=(0, 1.45 * more))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    bytes_axis(ax.xaxis)
    return fig


@styled
def boxes_of(layouts, shape, title=None):
    """Draw one matrix, cut into boxes in several layouts; each box has the number of its rank.

    layouts: {name: [(rank, offset, sizes)]}
    shape: of the matrix
    """
    fig, axes = figure(2.6 * len(layouts) + 0.6, 3, cols=len(layouts), squeeze=False)
    for ax, (name, cut) in zip(axes[0], layouts.items()):
        clean(ax)
        for rank, (row, column), (height, width) in cut:
            fill, ink = FILLS[rank % len(FILLS)]
            box(ax, column + width / 2, row + height / 2, rank, fill, ink, width, height)
        ax.set(xlim=(-1, shape[1] + 1), ylim=(shape[0] + 1, -1), aspect="auto")
        ax.set_title(name, fontsize=9.5)
    if title:
        fig.suptitle(title)
    return fig
