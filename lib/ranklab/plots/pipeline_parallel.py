"""The figures of lab 09: the layers of each rank, its actions over time, and what it holds."""

from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ranklab.pipeline_parallel import bubble_fraction, memory_line
from ranklab.plots.boxes import arrow, box
from ranklab.plots.gantt import Span, gantt
from ranklab.plots.style import DASHES, INK, TONES, clean, figure, styled

# Each kind has its tone, dark for F, then B and I, light for W, whose boxes are also lower. A
# rank's later stages are paler, but any F stays darker than any B. Idle time is white.
TONE = {"F": "#12355b", "B": "#e39d62", "I": "#e39d62", "W": "#cfdcc0"}
PALEST = {"F": 0.35, "B": 0.55, "I": 0.55, "W": 0.55}  # of the way to white
WIDTH, LANES = 9.0, 7.0  # inches: of a figure; of its lanes, about
UNIT = "time (1: a micro-batch's forward on a rank)"


@styled
def layers_on_ranks(stages, title="Activations and gradients travel, weights stay"):
    """Draw the ranks next to each other with their layers, and the messages between neighbours.

    stages: [[names of layers] of each rank]
    """
    fig, ax = figure(WIDTH, 2.6)
    clean(ax)
    most = max(map(len, stages))
    for rank, layers in enumerate(stages):
        box(ax, 2 * rank, (most - 1) / 2, "", fill="#eef2f5", width=1.1, height=most + 0.3)
        ax.text(2 * rank, -0.9, f"rank {rank}", ha="center", weight="bold")
        for index, layer in enumerate(layers):
            box(ax, 2 * rank, index + (most - len(layers)) / 2, layer, width=0.95, height=0.8,
                fontsize=9)
    for rank in range(len(stages) - 1):
        _travels(ax, 2 * rank + 1, 0.4, "hidden\n(B, T, C)", TONE["F"], 1)
        _travels(ax, 2 * rank + 1, most - 1.4, "gradient\n(B, T, C)", TONES[1], -1)
    ax.text(-0.8, 0.4, "tokens", ha="right", va="center")
    ax.text(2 * len(stages) - 1.2, 0.4, "loss", va="center")
    ax.set(xlim=(-1.4, 2 * len(stages) - 0.6), ylim=(most, -1.3), title=title)
    return fig


def _travels(ax, x, y, text, tone, way):
    arrow(ax, (x - 0.42 * way, y), (x + 0.42 * way, y), color=tone, lw=2)
    ax.text(x, y + 0.15, text, ha="center", va="top", fontsize=8)


@styled
def timeline(spans, title=None, ranks=None, xlabel=UNIT):
    """Draw a lane for each rank, a box for each action, and below them the activations in memory.

    The number in a box is its micro-batch; the curve counts activations.
    spans: from simulate, or measured: pipeline_parallel.Span
    title: the name of the run; the highest peak is added to it
    ranks: the ranks whose memory is drawn; None: those with the highest and with the lowest peak
    """
    spans, end, lanes = _from_zero(spans)
    fig, (top, bottom) = figure(WIDTH, 0.36 * lanes + 2.2, rows=2, sharex=True,
                                height_ratios=(0.36 * lanes, 1.1))
    _lanes(top, spans, end)
    lines = {rank: memory_line(spans, rank) for rank in range(lanes)}
    peak = {rank: max(held for _, held in line) for rank, line in lines.items()}
    if title:
        most = max(peak, key=peak.get)
        top.set_title(f"{title}: rank {most} holds up to {peak[most]} micro-batches")
    if ranks is None:
        ranks = dict.fromkeys((max(peak, key=peak.get), min(peak, key=peak.get)))
    for index, rank in enumerate(ranks):
        times, held = zip((0, 0), *lines[rank], (end, 0))
        bottom.step(times, held, where="post", color=TONES[index % 5], ls=DASHES[index % 5],
                    label=f"rank {rank}, at most {peak[rank]}")
    bottom.set(xlabel=xlabel, ylabel="activations", ylim=(0, 1.15 * max(peak.values())))
    bottom.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    bottom.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    _legend(fig, spans)
    return fig


@styled
def several(runs, title=None, flush=True, xlabel=UNIT, numbers=True):
    """Draw the lanes of several runs, one below the other, each with its bubble and its peak.

    All share one time axis. The peak is the largest number of micro-batches whose activations a
    rank holds, over all its stages together.
    title: None: the first and the last bubble
    flush: as for bubble_fraction
    numbers: whether boxes show their micro-batch; a run has none if some box is too narrow
    """
    timelines = {name: _from_zero(spans) for name, spans in runs.items()}
    end = max(end for _, end, _ in timelines.values())
    heights = [0.28 * lanes + 0.35 for _, _, lanes in timelines.values()]
    fig, axes = figure(WIDTH, sum(heights) + 0.9, rows=len(timelines), sharex=True, squeeze=False,
                       height_ratios=heights)
    bubbles = {name: bubble_fraction(spans, flush) for name, (spans, _, _) in timelines.items()}
    for ax, (name, (spans, _, lanes)) in zip(axes[:, 0], timelines.items()):
        _lanes(ax, spans, end, numbers)
        ax.set_title(name, loc="left", pad=3)
        peak = max(held for rank in range(lanes) for _, held in memory_line(spans, rank))
        each = len({span.action.stage for span in spans}) / lanes
        ax.text(1.01, 0.5, f"bubble {bubbles[name]:.1%}\nholds {peak / each:g}\n"
                f"micro-batch{'es' * (peak > each)}", transform=ax.transAxes, va="center",
                fontsize=9)
    axes[-1, 0].set_xlabel(xlabel)
    fig.suptitle(_headline(bubbles) if title is None else title)
    _legend(fig, *(spans for spans, _, _ in timelines.values()))
    return fig


def _headline(bubbles):
    """Return the title of several runs: how the bubble changes from the first to the last."""
    (first, before), *_, (last, after) = [*bubbles.items()] * 2 if len(bubbles) < 2 \
        else bubbles.items()
    if abs(before - after) < 0.001:
        return f"{first} and {last}: a bubble of {after:.1%}"
    return f"{first}: a bubble of {before:.1%}; {last}: {after:.1%}"


def _from_zero(spans):
    """Return (spans that start at 0, the last end, number of ranks)."""
    start = min(span.start for span in spans)
    shifts = [span._replace(start=span.start - start, end=span.end - start) for span in spans]
    return shifts, max(s.end for s in shifts), max(s.rank for s in shifts) + 1


def _lanes(ax, spans, end, numbers=True):
    stages, looks, boxes = _stages(spans), {}, []
    digits = len(str(max(span.action.micro_batch for span in spans)))
    inches = LANES * min(span.end - span.start for span in spans if span.action.kind != "W") / end
    points = 110 * inches / digits  # of the largest letters that fit into every box
    for rank, (kind, stage, micro_batch), start, stop in spans:
        index = stages[rank].index(stage)
        tone = _paler(TONE[kind], PALEST[kind] * index / max(1, len(stages[rank]) - 1))
        looks[kind, index] = {"facecolor": tone, "edgecolor": "white", "lw": 0.6}
        boxes.append(Span(rank, start, stop, (kind, index), 0.55 if kind == "W" else 0.86))
        if numbers and points > 6.5:
            ax.text((start + stop) / 2, rank, micro_batch, ha="center", va="center_baseline",
                    fontsize=min(7, points), color="white" if sum(tone) < 1.5 else INK)
    gantt(ax, sorted(boxes, key=lambda box: box.kind),  # one call of matplotlib for each kind
          {rank: f"rank {rank}" for rank in stages}, looks)
    ax.set(xlim=(0, end), ylim=(max(stages) + 0.5, -0.5))
    ax.grid(False)


def _stages(spans):
    """Return {rank: its stages in order}."""
    pairs = sorted({(span.rank, span.action.stage) for span in spans})
    return {rank: [stage for one, stage in pairs if one == rank] for rank, _ in pairs}


def _paler(tone, part):
    """Return `tone` mixed with white: for part 0 itself, for 1 white."""
    return tuple(value + part * (1 - value) for value in to_rgb(tone))


def _legend(fig, *timelines):
    kinds = {span.action.kind for spans in timelines for span in spans}
    half = "gradient of the input"
    names = {"F": "forward", "B": f"backward, or {half}" if "I" in kinds else "backward",
             "I": f"backward: {half}", "W": "gradient of the weights"}
    subset = kinds - {"I"} if "B" in kinds else kinds
    handles = [Patch(facecolor=TONE[kind], label=names[kind]) for kind in TONE if kind in subset]
    if any(len(stages) > 1 for spans in timelines for stages in _stages(spans).values()):
        handles.append(Patch(facecolor="none", label="paler: later stages"))
    fig.legend(handles=handles, loc="outside lower center", ncols=4)
