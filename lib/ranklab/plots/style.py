"""One style for every figure of the course: readable in grey, with units on axes, SVG for slides.

    @styled
    def time_of_ring(sizes, seconds):
        fig, ax = figure(7, 3)                 # inches; rows= and cols= for several axes
        line(ax, sizes, seconds, 0, "ring")    # 0, 1, 2: tone, marker, dashes that differ in grey
        bytes_axis(ax.xaxis)
        seconds_axis(ax.yaxis)
        return fig                             # the last line of a cell shows it, once

Colour is never the only difference: lines also differ in dashes and markers, areas in hatching, and
shades of one colour keep their order when printed in grey.
"""

import functools
import io
import itertools
import re

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from PIL import Image

INK = "#22313f"  # text, axes
FAINT = "#c9d1d9"  # grids, empty cells
TONES = ("#12355b", "#c8651b", "#7fa650", "#7a6f9b", "#4aa3b5")  # dark to light in grey, nearly
MARKERS = ("o", "s", "^", "D", "v")
DASHES = ("-", "--", "-.", ":", (0, (6, 2)))
HATCHES = ("", "///", "...", "\\\\\\", "xxx")

RC = {
    "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.labelsize": 10,
    "figure.titlesize": 11, "figure.titleweight": "bold",
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "axes.titlecolor": INK,
    "xtick.color": INK, "ytick.color": INK, "xtick.labelsize": 9, "ytick.labelsize": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8,
    "axes.grid": True, "grid.color": FAINT, "grid.linewidth": 0.6, "axes.axisbelow": True,
    "legend.frameon": False, "legend.fontsize": 9, "lines.linewidth": 2, "lines.markersize": 6,
    "hatch.linewidth": 0.6, "figure.dpi": 100, "savefig.dpi": 100, "figure.facecolor": "white",
    "svg.fonttype": "none",  # text in the SVG stays text: small files, sharp slides
    "svg.hashsalt": "ranklab",  # the same figure gives the same file
}


class CourseFigure(Figure):
    """A figure that a notebook displays by itself; without pyplot there is no global state.

    `what` describes it for people who can't see it: see styled().
    """

    description = ""

    def _repr_png_(self):
        """Return (the picture, its metadata); a page made from the notebook uses its `alt`."""
        large, small = io.BytesIO(), io.BytesIO()
        with matplotlib.rc_context(RC):
            self.savefig(large, format="png")
        # 64 colours are plenty for these drawings, and the notebook stays a third of the size.
        picture = Image.open(large).convert("RGB").quantize(64, dither=Image.Dither.NONE)
        picture.save(small, "png", optimize=True)
        return small.getvalue(), {"alt": self.alt()}

    def alt(self):
        """Return the titles, what the figure shows, and the words of its axes and legends."""
        titles = [self.get_suptitle(), *(ax.get_title() for ax in self.axes)]
        axes = [f"{way}: {text}" for ax in self.axes
                for way, text in (("across", ax.get_xlabel()), ("up", ax.get_ylabel())) if text]
        legends = [text.get_text() for ax in self.axes if ax.get_legend()
                   for text in ax.get_legend().get_texts()]
        parts = [", ".join(dict.fromkeys(filter(None, texts)))
                 for texts in (titles, [self.description], axes, legends)]
        return " ".join(f"{part.rstrip('.')}." for part in parts if part).replace("\n", " ")


def figure(width=7.0, height=3.2, rows=1, cols=1, **kwargs):
    """Return (figure, axes) in the course's style; the cell that returns the figure shows it."""
    with matplotlib.rc_context(RC):
        fig = CourseFigure(figsize=(width, height), layout="constrained")
        return fig, fig.subplots(rows, cols, **kwargs)


def styled(draw):
    """Wrap `draw` so that all that it draws has the course's style: titles, legends, texts.

    The start of its docstring, up to the first mention of code, describes the figure.
    """
    first = re.sub(r"`(\w+)`", r"\1", " ".join((draw.__doc__ or "").split("\n\n")[0].split()))
    clauses = itertools.takewhile(lambda clause: "{" not in clause, re.split("(?<=[;.]) ", first))
    description = " ".join(clauses).strip(";.").removeprefix("Draw ")
    description = description[:1].upper() + description[1:]

    @functools.wraps(draw)
    def in_style(*args, **kwargs):
        with matplotlib.rc_context(RC):
            fig = draw(*args, **kwargs)
        if isinstance(fig, CourseFigure):
            fig.description = description
            for title in (fig._suptitle, *(ax.title for ax in fig.axes)):
                if title:  # a slide may be narrower than the notebook
                    title.set_wrap(True)
        return fig

    return in_style


def save(fig, path):
    """Save `fig` to the file `path` (.svg for slides, .png to look at); return the path."""
    metadata = {"Date": None} if str(path).endswith(".svg") else None
    with matplotlib.rc_context(RC):
        fig.savefig(path, metadata=metadata)
    return path


def line(ax, x, y, index, label, **kwargs):
    """Draw a line on `ax` in tone, marker and dashes number `index`; return it."""
    look = {"color": TONES[index % 5], "marker": MARKERS[index % 5], "linestyle": DASHES[index % 5]}
    return ax.plot(x, y, label=label, **{**look, **kwargs})[0]


def bars(ax, x, height, index, label=None, **kwargs):
    """Draw bars on `ax` in tone and hatching number `index`; return them.

    `bottom=` stacks them, `barh=True` makes them horizontal.
    """
    kind = ax.barh if kwargs.pop("barh", False) else ax.bar
    return kind(x, height, label=label, **{**look(index), **kwargs})


def look(index):
    """Return the tone and the hatching of areas number `index`."""
    return {"facecolor": TONES[index % 5], "hatch": HATCHES[index % 5], "edgecolor": "white"}


def clean(ax):
    """Remove axes, ticks and grid from `ax`: a canvas for a drawing."""
    ax.set_axis_off()
    ax.grid(False)


def bare_grid(ax, xlabels, ylabels):
    """Make `ax` a table of cells: one tick per row and column, without lines."""
    ax.grid(False)
    ax.set_xticks(range(len(xlabels)), xlabels)
    ax.set_yticks(range(len(ylabels)), ylabels)
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)


def human_bytes(n):
    """Format `n` bytes for a reader, in decimal units as for links: 1500000 -> '1.5 MB'."""
    return _human(n, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3), ("B", 1)))


def human_seconds(s):
    """Format `s` seconds for a reader: 0.0015 -> '1.5 ms'."""
    return _human(s, (("s", 1), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)))


def bytes_axis(axis):
    """Write the ticks of `axis` (ax.xaxis or ax.yaxis) as bytes."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value)))
    axis.set_minor_formatter(NullFormatter())


def seconds_axis(axis):
    """Write the ticks of `axis` (ax.xaxis or ax.yaxis) as seconds."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: human_seconds(value)))
    axis.set_minor_formatter(NullFormatter())


def _human(value, units):
    for name, size in units:
        if abs(value) >= size:
            break
    return f"{value / size:.3g} {name}" if value else f"0 {name}"
