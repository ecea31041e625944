"""Boxes and circles with text, and arrows between them."""

from matplotlib.patches import Circle, Rectangle

from ranklab.plots.style import INK, TONES


def box(ax, x, y, text, fill="white", ink=INK, width=0.62, height=0.56, edge=INK, lw=0.8, **words):
    """Draw a box around (x, y) with a text in it; `words` are options for the text."""
    ax.add_patch(Rectangle((x - width / 2, y - height / 2), width, height, facecolor=fill,
                           edgecolor=edge, lw=lw))
    ax.text(x, y, text, ha="center", va="center", color=ink, **words)


def disc(ax, x, y, text, radius, fill=TONES[0], ink="white", **words):
    """Draw a rank as a circle with a text, over lines and over arrows with a zorder below 2."""
    ax.add_patch(Circle((x, y), radius, fc=fill, ec=INK, zorder=2))
    ax.text(x, y, str(text), color=ink, ha="center", va="center", zorder=3, **words)


def arrow(ax, start, end, zorder=3, **look):
    """Draw an arrow from `start` to `end`; `look` changes its colour, width and head."""
    ax.annotate("", end, start, zorder=zorder,
                arrowprops={"arrowstyle": "->", "color": INK, **look})
