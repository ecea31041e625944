"""The figures of lab 08: regions between f and g, what is outside them, how far tp scales."""

from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator

from ranklab.plots.boxes import arrow, box, disc
from ranklab.plots.style import FAINT, INK, TONES, clean, figure, line, seconds_axis, styled

SHADES = ((TONES[0], "white"), ("#e6b88f", INK))  # of a rank, and of the letters on it


@styled
def regions(title="Columns, then rows: nothing is sent between f and g"):
    """Draw an MLP and an attention over two ranks, with f and g in their places."""
    fig, ax = figure(8.2, 4.9)
    clean(ax)
    mlp, attention = (0, "GELU", "A", "B"), (3.9, "each head\nby itself", "QKV", "O")
    for middle, text, names, last in (mlp, attention):
        tall = 1.25 if len(names) == 1 else 2.25
        ax.add_patch(Rectangle((2, middle - tall), 8, 2 * tall, fc="#eef2f5", ec=FAINT))
        for place, name in enumerate(names):
            y = middle + 1.3 * (place - len(names) // 2)
            _matrix(ax, 4, y, name, across=True)
            arrow(ax, (2.35, middle), (3.2, y))
            arrow(ax, (4.8, y), (5.5, middle))
        _matrix(ax, 8.4, middle, last, across=False)
        box(ax, 6.5, middle, text, width=2, height=0.9)
        for start, end in ((0.6, 1.65), (7.5, 8), (8.8, 9.65), (10.35, 11.4)):
            arrow(ax, (start, middle), (end, middle))
        for x, letter, tone in ((2, "f", TONES[0]), (10, "g", TONES[1])):
            disc(ax, x, middle, letter, 0.34, tone)
        for x, letter in ((0.3, "x"), (11.7, "y")):
            ax.text(x, middle, letter, ha="center", va="center", fontsize=12)
    for x, text in ((2, "backward:\nall-reduce"), (10, "forward:\nall-reduce")):
        ax.text(x, 0.42, text, ha="center", va="top", fontsize=8.5,
                bbox={"fc": "white", "ec": "none", "pad": 1})
    ax.text(6, 6.5, "in a matrix: the rank that holds the part", ha="center", va="center",
            fontsize=9)
    ax.set(xlim=(-0.2, 12.2), ylim=(6.8, -1.4), aspect="equal", title=title)
    return fig


def _matrix(ax, x, y, name, across):
    """Draw a matrix as in the paper, (in, out): `across` cuts it by columns, else by rows."""
    for rank, (tone, ink) in enumerate(SHADES):
        step = 0.8 * rank - 0.4
        width, height = (0.8, 0.7) if across else (0.7, 0.8)
        box(ax, x + step * across, y + step * (not across), rank, tone, ink, width, height, "white")
    ax.text(x, y - (0.37 if across else 0.82), name, ha="center", va="bottom", fontweight="bold")


@styled
def outside(ranks=4, title="Sequence parallelism shards what was whole (a schematic)"):
    """Draw the tokens that one rank has along a layer, with and without sequence parallelism.

    Outside the regions a rank has all tokens, or with sequence parallelism only some of them.
    """
    fig, ax = figure(8, 3)
    clean(ax)
    names = ("norm", "attention", "drop, add", "norm", "MLP", "drop, add")
    for y, label, whole in ((0, "tensor", True), (1.6, "and\nsequence", False)):
        ax.text(-0.15, y + 0.5, label, ha="right", va="center", fontweight="bold")
        for place, name in enumerate(names):
            is_inside = name in ("attention", "MLP")
            ax.text(place + 0.5, y - 0.06, name, ha="center", va="bottom", fontsize=9)
            for rank in range(ranks):
                has = rank == 0 or whole and not is_inside
                tone = TONES[0 if is_inside else 1] if has else FAINT
                ax.add_patch(Rectangle((place + 0.06, y + rank / ranks), 0.88, 1 / ranks, fc=tone,
                                       ec="white"))
            if is_inside:
                for x, letter in ((place, "f"), (place + 1, "g")):
                    ax.text(x, y + 0.5, letter, ha="center", va="center", fontweight="bold")
    ax.set(xlim=(-0.9, 6.1), ylim=(2.7, -0.35), title=title)
    return fig


@styled
def curves(ranks, seconds, title=None):
    """Draw the time of a step by number of ranks; `seconds` is {name of a link: [seconds]}.

    The title names the increase in ranks that costs most.
    """
    worst, name, place = max((times[i] / times[i - 1], name, i) for name, times in seconds.items()
                             for i in range(1, len(times)))
    if title is None:
        title = f"{name}: {ranks[place]} ranks take {worst:.1f} times as long as {ranks[place - 1]}"
    fig, ax = figure(7.4, 3.3)
    for index, (name, times) in enumerate(seconds.items()):
        line(ax, ranks, times, index, name)
    ax.set(xscale="log", yscale="log", title=title, xlabel="ranks in each layer (tp)",
           ylabel="time of a step")
    ax.set_xticks(ranks, ranks)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.minorticks_off()
    seconds_axis(ax.yaxis)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig
