"""Lanes of coloured spans over time: the timelines of labs 01, 03, 04, 05 and 09."""

from itertools import groupby
from typing import NamedTuple

from matplotlib.patches import Patch

from ranklab.plots.style import INK, TONES, look

# The look of each kind of event. A wait is empty, because nothing happens.
LOOKS = {
    "compute": {"facecolor": TONES[0], "edgecolor": TONES[0]},
    "communication": look(1),
    "loader": look(2),
    "wait": {"facecolor": "white", "edgecolor": INK, "lw": 0.5},
    "hidden": {**look(1), "facecolor": "#f0d6bd", "edgecolor": TONES[1], "lw": 0.6},
    "exposed": {"facecolor": TONES[1], "edgecolor": INK, "lw": 0.9},
}


class Span(NamedTuple):
    """One bar: `row` is its middle, `kind` a key of `looks` or the number of a tone and hatching.
    """

    row: float
    start: float
    end: float
    kind: str | int
    height: float = 0.6


def gantt(ax, spans, names=None, looks=LOOKS, **changes):
    """Draw the spans, later ones on top; `names` is {row: its label}.

    looks: {kind: its options for drawing}
    changes: options for all looks: lw=0.3, label="copy in"
    """
    for kind, same in groupby(spans, lambda span: span.kind):
        rows, starts, ends, _, heights = zip(*same)
        widths = [end - start for start, end in zip(starts, ends)]
        tone = looks[kind] if kind in looks else look(kind)
        ax.barh(rows, widths, heights, starts, **{**changes, **tone})
    if names:
        ax.set_yticks(list(names), names.values())
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="y", visible=False)


def boxed(ax, x, y, text, pad=0.8, **words):
    """Write `text` on white, centred on (x, y): readable on any colour."""
    ax.text(x, y, text, ha="center", va="center",
            bbox={"fc": "white", "ec": "none", "pad": pad}, **words)


def kinds_below(fig, names):
    """Draw a legend below the figure; `names` is {kind of LOOKS: its meaning}."""
    handles = [Patch(**LOOKS[kind], label=name) for kind, name in names.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def merged(events, start, gap):
    """Merge events to [(from, to)] in ms since `start`, in order.

    Spans at most `gap` ms apart are joined.
    """
    spans = []
    for event in sorted(events, key=lambda e: e.start):
        a, b = 1e3 * (event.start - start), 1e3 * (event.end - start)
        if spans and a - spans[-1][1] <= gap:
            spans[-1] = spans[-1][0], max(spans[-1][1], b)
        else:
            spans.append((a, b))
    return spans
