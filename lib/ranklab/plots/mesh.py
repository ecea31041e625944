"""The figure of a mesh: a panel for each axis, with lines between the ranks that talk along it."""

import math

from matplotlib.patches import FancyArrowPatch

from ranklab.plots.boxes import disc
from ranklab.plots.style import DASHES, FAINT, INK, TONES, clean, figure, styled

BACK = 0.8  # how far right and up the next rank behind is drawn
FILLS = ((TONES[0], "white"), ("white", INK), ("#8a97a3", INK), (FAINT, INK))  # of nodes, and text


@styled
def who_talks_to_whom(mesh, per_node=None):
    """Draw the ranks in the same places for each axis; lines join the ranks of each of its groups.

    With `per_node`, ranks of a node have one fill (of four, then the first again), and a line that
    leaves a node is dashed. Between boxes (a fourth axis) the lines are faint, except for rank 0.
    """
    at, width, height = _places(mesh)
    rows = 1 if len(mesh.axes) * (width + 1.2) < 18 else len(mesh.axes)
    cols = len(mesh.axes) // rows
    scale = min(0.62, 10.5 / (cols * (width + 1.2)))
    fig, axs = figure(max(3.4 * cols, scale * cols * (width + 1.2)), scale * rows * (height + 1.6),
                      rows, cols, squeeze=False)
    for ax, (number, axis) in zip(axs.flat, enumerate(mesh.axes)):
        clean(ax)
        is_far = number < len(mesh.axes) - 3
        for ranks in mesh.all_along(axis):
            for a, b in zip(ranks, ranks[1:]):
                _link(ax, at[a], at[b], per_node and a // per_node != b // per_node, is_far,
                      is_bold=not is_far or 0 in ranks)
        for rank, place in enumerate(at):
            fill, ink = FILLS[rank // per_node % len(FILLS)] if per_node else FILLS[0]
            disc(ax, *place, rank, 0.28, fill, ink, fontsize=15 * scale)
        ax.set_title(_title(mesh, axis, per_node), fontsize=9.5)
        ax.set(xlim=(-0.6, width + 0.6), ylim=(height + 0.4, -0.5), aspect="equal")
    return fig


def _title(mesh, axis, per_node):
    title = f"{axis}: {len(mesh.all_along(axis))} groups of {mesh.axes[axis]}"
    if not per_node:
        return title
    return title + (", inside a node" if axis in mesh.axes_inside(per_node) else ", crosses nodes")


def _places(mesh):
    """([(x, y) of each rank], width, height): the last axis to the right, the one before it down,
    the one before that to the back, as in a drawing of a box; further ones as boxes side by side.
    """
    sizes = [*reversed(mesh.axes.values()), 1, 1, 1]
    deep = sizes[2]
    pitch = 1 + BACK * (deep - 1)  # room for the ranks behind
    height = (sizes[1] - 1) * pitch + BACK * (deep - 1)
    width = (sizes[0] - 1) * pitch + BACK * (deep - 1)
    at = []
    for rank in range(mesh.size):
        right, down, back, *_ = [*reversed(mesh.coordinates(rank).values()), 0, 0, 0]
        number = rank // math.prod(sizes[:3])
        at.append((right * pitch + back * BACK + number * (width + 2),
                   down * pitch + (deep - 1 - back) * BACK))
    return at, width + (mesh.size // math.prod(sizes[:3]) - 1) * (width + 2), height


def _link(ax, a, b, crosses, is_far, is_bold):
    """A line from place a to place b; `is_far`: an arc from box to box, faint unless `is_bold`."""
    tone = TONES[1] if crosses else TONES[0]
    ax.add_patch(FancyArrowPatch(
        a, b, arrowstyle="-", lw=1.8 if is_bold else 1, zorder=1, shrinkA=0, shrinkB=0,
        color=tone if is_bold else FAINT, linestyle=DASHES[1] if crosses else DASHES[0],
        connectionstyle=f"arc3,rad={-0.2 if is_far else 0}"))
