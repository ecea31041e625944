"""The figure of a mesh: a panel for each axis, with lines between ranks that communicate along it.
"""

import math

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from ranklab.plots.boxes import disc
from ranklab.plots.style import DASHES, FAINT, INK, TONES, clean, figure, styled

BACK = 0.8  # offset, to the right and up, of the next rank behind


@styled
def who_talks_to_whom(mesh, per_node=None):
    """Draw the ranks in the same places for each axis; lines join the ranks of each of its groups.

    With `per_node`, a box is a node, and a line that leaves its node is dashed. If many lines lead
    from square to square, they are faint, except for rank 0.
    """
    flat = 2 if per_node else 3  # in 3D one node would hide the next
    places, width, height = _places(mesh, flat)
    nodes = _nodes(places, per_node) if per_node else []
    pad = 2.4 if nodes else 1.2  # their names are on the left
    rows = 1 if len(mesh.axes) * (width + pad) < 18 else len(mesh.axes)
    cols = len(mesh.axes) // rows
    scale = min(0.62, 10.5 / (cols * (width + pad)))
    fig, axs = figure(max(3.4 * cols, scale * cols * (width + pad)), scale * rows * (height + 1.6),
                      rows, cols, squeeze=False)
    for ax, (number, axis) in zip(axs.flat, enumerate(mesh.axes)):
        clean(ax)
        is_far = number < len(mesh.axes) - flat
        for node, (x, y, right, down) in enumerate(nodes):
            ax.add_patch(FancyBboxPatch((x - 0.36, y - 0.36), right - x + 0.72, down - y + 0.72,
                                        fc="#eef2f5", ec=INK, lw=0.8, zorder=0,
                                        boxstyle="round,pad=0.05"))
            ax.text(x - 0.55, (y + down) / 2, f"node {node}", ha="right", va="center", fontsize=9)
        for ranks in mesh.all_along(axis):
            for a, b in zip(ranks, ranks[1:]):
                _link(ax, places[a], places[b], per_node and a // per_node != b // per_node, is_far,
                      is_bold=not is_far or 0 in ranks or mesh.size <= 8)
        for rank, place in enumerate(places):
            disc(ax, *place, rank, 0.28, fontsize=15 * scale)
        ax.set_title(_title(mesh, axis, per_node), fontsize=9.5)
        ax.set(xlim=(0.6 - pad, width + 0.6), ylim=(height + 0.5, -0.6), aspect="equal")
    if per_node and mesh.size > per_node:
        fig.suptitle(_headline(mesh, per_node))
    return fig


def _headline(mesh, per_node):
    """Return the title: along which axes messages leave a node."""
    inside = mesh.axes_inside(per_node)
    leave, stay = ", ".join(axis for axis in mesh.axes if axis not in inside), ", ".join(inside)
    return f"Between nodes: {leave}" + (f"; inside a node: {stay}" if stay else "")


def _nodes(places, per_node):
    """Return (left, top, right, bottom) of each node's ranks; [] if such boxes would overlap."""
    boxes = []
    for first in range(0, len(places), per_node):
        x, y = zip(*places[first:first + per_node])
        boxes.append((min(x), min(y), max(x), max(y)))
    inside = sum(left <= x <= right and top <= y <= bottom
                 for left, top, right, bottom in boxes for x, y in places)
    return boxes if inside == len(places) else []


def _title(mesh, axis, per_node):
    title = f"{axis}: {len(mesh.all_along(axis))} groups of {mesh.axes[axis]}"
    if not per_node:
        return title
    return title + (", inside a node" if axis in mesh.axes_inside(per_node) else ", crosses nodes")


def _places(mesh, flat):
    """Return ([(x, y) of each rank], width, height): the last axis to the right, the one before it
    down, the one before that to the back, as in a drawing of a box; further axes as boxes side by
    side. With `flat` = 2 no square is behind another: they are below each other.
    """
    sizes = [*reversed(mesh.axes.values()), 1, 1, 1]
    deep = sizes[2] if flat == 3 else 1
    pitch = 1 + BACK * (deep - 1)  # room for the ranks behind
    height = (sizes[1] - 1) * pitch + BACK * (deep - 1)
    width = (sizes[0] - 1) * pitch + BACK * (deep - 1)
    places, boxes = [], mesh.size // math.prod(sizes[:flat])
    step = (width + 2, 0) if flat == 3 else (0, height + 1.6)
    for rank in range(mesh.size):
        right, down, back, *_ = [*reversed(mesh.coordinates(rank).values()), 0, 0, 0]
        number, back = rank // math.prod(sizes[:flat]), back if flat == 3 else 0
        places.append((right * pitch + back * BACK + number * step[0],
                       down * pitch + (deep - 1 - back) * BACK + number * step[1]))
    return places, width + (boxes - 1) * step[0], height + (boxes - 1) * step[1]


def _link(ax, a, b, crosses, is_far, is_bold):
    """Draw a line from place a to place b; `is_far`: an arc between boxes, faint unless `is_bold`.
    """
    tone = TONES[1] if crosses else TONES[0]
    ax.add_patch(FancyArrowPatch(
        a, b, arrowstyle="-", lw=1.8 if is_bold else 1, zorder=1, shrinkA=0, shrinkB=0,
        color=tone if is_bold else FAINT, linestyle=DASHES[1] if crosses else DASHES[0],
        connectionstyle=f"arc3,rad={-0.3 * is_far}"))
