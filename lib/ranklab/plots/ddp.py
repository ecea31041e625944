"""The figures of lab 04: one step of a production run, its scaling, and why it is slow."""

from matplotlib.ticker import NullFormatter

from ranklab.plots.boxes import arrow
from ranklab.plots.gantt import Span, boxed, gantt, kinds_below, merged
from ranklab.plots.style import FAINT, INK, TONES, bytes_axis, clean, figure, line, styled

# The opening picture, in parts of a step: (start, length) of forward and of the backward of each
# bucket, then of each bucket's all-reduce: it begins when its gradients are ready and the previous
# all-reduce has ended.
FORWARD, BACKWARD = (0.0, 2.0), ((2.0, 1.0), (3.0, 1.0), (4.0, 1.0), (5.0, 1.0))
ALL_REDUCE = ((3.0, 1.2), (4.2, 1.2), (5.4, 1.2), (6.6, 1.2))
OPTIMIZER = (7.8, 0.6)


def _block(ax, row, start, length, text, kind):
    middle, is_compute = start + length / 2, kind == "compute"
    # number 0 has the tone of computation, and white edges between blocks
    gantt(ax, [Span(row, start, start + length, 0 if is_compute else kind, 0.62)], lw=1)
    if is_compute:
        ax.text(middle, row, text, ha="center", va="center", fontsize=9, color="white")
    else:
        boxed(ax, middle, row, text, fontsize=9)


@styled
def production_step(ranks=2):
    """Draw the parts of one step of a DDP run on each rank: schematic, not to scale.

    "back 1" is the backward that fills bucket 1, "sum 1" the all-reduce of this bucket.
    """
    fig, ax = figure(8.2, 1.5 * ranks + 1.5)
    clean(ax)
    for rank in range(ranks):
        top = 3.5 * rank
        ax.text(-1.7, top + 1, f"rank {rank}", va="center", ha="right", fontweight="bold")
        for row, name in enumerate(("workers", "device", "network")):
            ax.text(-0.12, top + row, name, va="center", ha="right", fontsize=9)
            ax.plot((0, 8.4), (top + row, top + row), color=FAINT, lw=0.8, zorder=0)
        for number in range(2):
            _block(ax, top, 4.2 * number, 4, f"read batch {number + 2}", "loader")
        _block(ax, top + 1, *FORWARD, "forward", "compute")
        for bucket, (back, travel) in enumerate(zip(BACKWARD, ALL_REDUCE), 1):
            _block(ax, top + 1, *back, f"back {bucket}", "compute")
            _block(ax, top + 2, *travel, f"sum {bucket}", "communication")
        _block(ax, top + 1, *OPTIMIZER, "SGD", "compute")
        arrow(ax, (3, top + 1.34), (3, top + 1.66), lw=1.2)
    exposed = BACKWARD[-1][0] + BACKWARD[-1][1], OPTIMIZER[0]
    bottom = 3.5 * ranks - 0.55
    ax.axvspan(*exposed, color=FAINT, alpha=0.5, zorder=-1)
    ax.text(sum(exposed) / 2, bottom, "exposed: nothing\nis computed", ha="center", va="top",
            fontsize=9)
    ax.text(3.05, bottom, "the bucket of the last layers is full:\nits all-reduce begins, backward "
            "goes on", ha="center", va="top", fontsize=9)
    ax.set(xlim=(-2.9, 8.6), ylim=(bottom + 1.1, -0.5),
           title="What still travels when backward is over is exposed")
    return fig


@styled
def scaling(rows, setting=None):
    """Draw images per second against ranks, with the ideal.

    `rows`: see projects.ddp.strong_and_weak; `setting`: the model
    """
    fig, ax = figure(7, 3.6)
    ranks = sorted({row.ranks for row in rows})
    one = next(row for row in rows if row.ranks == ranks[0])
    ideal = [one.images_per_second * R / ranks[0] for R in ranks]
    line(ax, ranks, ideal, 3, "ideal", color=INK, marker="", linewidth=1.2)
    texts = {"weak": ("weak: a batch each", 9, "bottom"),
             "strong": ("strong: one batch", -10, "top")}
    for index, (kind, (label, shift, side)) in enumerate(texts.items()):
        group = [row for row in rows if row.kind == kind]
        line(ax, [r.ranks for r in group], [r.images_per_second for r in group], index, label)
        for row in group[1:]:
            ax.annotate(f"{row.efficiency:.0%}", (row.ranks, row.images_per_second), (0, shift),
                        textcoords="offset points", ha="center", va=side, fontsize=9,
                        color=TONES[index], fontweight="bold",
                        bbox={"fc": "white", "ec": "none", "pad": 0.5})
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(ranks, map(str, ranks))
    ax.set_yticks(ideal, [f"{images:,.0f}" for images in ideal])
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())
    low = min(row.images_per_second for row in rows)
    last = {row.kind: f"{row.efficiency:.0%}" for row in rows if row.ranks == ranks[-1]}
    title = ", ".join(f"{last[kind]} with {words}" for kind, words in (
        ("weak", "a batch each"), ("strong", "one batch")) if kind in last)
    ax.set(xlabel="ranks" + (f" ({setting})" if setting else ""), ylabel="images per second",
           title=f"Efficiency on {ranks[-1]} ranks: {title}",
           xlim=(ranks[0] / 1.15, ranks[-1] * 1.15), ylim=(low / 1.6, max(ideal) * 1.25))
    ax.legend(loc="upper left", title="percent: efficiency", title_fontsize=9,
              alignment="left")
    return fig


@styled
def situations(timelines, verdicts=None, cols=2):
    """Draw a timeline of each rank, in a panel for each situation.

    `timelines` is {title: [events of each rank]}. Each rank has two rows: the work of its device
    and its main thread, and the messages on the network. `verdicts`, {title: text}, are added to
    the titles; there are `cols` panels in a row.
    """
    cols = min(cols, len(timelines))
    rows = -(-len(timelines) // cols)
    ranks = max(len(of_ranks) for of_ranks in timelines.values())
    fig, axes = figure(8.2, rows * (0.48 * ranks + 0.95) + 0.35, rows, cols, squeeze=False)
    for ax in axes.flat[len(timelines):]:
        clean(ax)
    for ax, (title, of_ranks) in zip(axes.flat, timelines.items()):
        _lanes(ax, of_ranks)
        verdict = (verdicts or {}).get(title)
        ax.set_title(f"{title}: {verdict}" if verdict else title)
    for ax in axes[:-1].flat:
        ax.set_xlabel("")  # the last row has it
    kinds_below(fig, {"compute": "computes", "communication": "communicates", "loader": "loads",
                      "wait": "waits"})
    return fig


def _lanes(ax, of_ranks):
    first = min(event.start for events in of_ranks for event in events)
    last = max(event.end for events in of_ranks for event in events)
    for rank, events in enumerate(of_ranks):
        for kind in ("wait", "loader", "compute", "communication"):  # the later ones lie on top
            same = [e for e in events if e.kind == kind]
            row, height = (rank + 0.17, 0.26) if kind == "communication" else (rank - 0.16, 0.4)
            gantt(ax, [Span(row, a, b, kind, height)
                       for a, b in merged(same, first, last - first)], lw=0)  # gap: 1/1000
    gantt(ax, [], {rank: f"rank {rank}" for rank in range(len(of_ranks))})
    ax.set(ylim=(len(of_ranks) - 0.45, -0.55), xlim=(0, 1e3 * (last - first)), xlabel="ms")


@styled
def loss_against_bytes(rows, setting=None, tolerance=0.03):
    """Draw held-out loss against the bytes that a rank sends in a step.

    `rows` are Quality tuples of ddp.quality. A name with "..., no feedback" is drawn hollow, with a
    line to the same hook with feedback, whose name labels both. The title names the fewest bytes
    at a loss of at most `tolerance` above the first row. `setting`: the model and the ranks.
    """
    fig, ax = figure(7.4, 3.6)
    points = {row.name: (row.sent, row.loss) for row in rows}
    families = list(dict.fromkeys(_family(name) for name in points))
    for name, (sent, loss) in points.items():
        index, without = families.index(_family(name)), name.endswith("no feedback")
        line(ax, [sent], [loss], index, None, linestyle="", zorder=3,
             markerfacecolor="white" if without else TONES[index % 5])
        full = points.get(name.removesuffix(", no feedback"))
        if without and full:
            ax.plot(*zip(full, (sent, loss)), color=TONES[index % 5], lw=1, ls=":")
        elif not without:
            ax.annotate(name, (sent, loss), (7, 0), textcoords="offset points", va="center",
                        fontsize=9)
    ax.plot([], [], "o", color=INK, markerfacecolor="white", label="no feedback")
    first = rows[0]
    good = [row for row in rows if row.loss <= first.loss + tolerance]
    least = min(good, key=lambda row: row.sent)
    title = f"{least.name} sends {first.sent / least.sent:,.0f} times less than {first.name}, at " \
            f"{least.loss - first.loss:+.3f} nats"
    ax.set(xscale="log", title=title,
           xlabel="bytes that a rank sends in a step" + (f"\n({setting})" if setting else ""),
           ylabel="loss (nats per byte, held out)")
    low, high = min(row.sent for row in rows), max(row.sent for row in rows)
    ax.set_xlim(low / 1.5, high * 4)  # the last name fits
    ax.legend(loc="upper right")
    bytes_axis(ax.xaxis)
    return fig


@styled
def loss_by_bytes(runs, setting=None):
    """Draw held-out loss against all bytes that a rank has sent, one line for each way to train.

    `runs` are Progress tuples of ddp.quality, measured after the same steps; `setting`: the model
    and the ranks.
    """
    fig, ax = figure(7.4, 3.6)
    for index, run in enumerate(runs):
        line(ax, run.sent, run.loss, index, run.name)
    first, least = runs[0], min(runs, key=lambda run: run.sent[-1])
    title = f"{least.name}: {first.sent[-1] / least.sent[-1]:,.0f} times fewer bytes, " \
            f"{least.loss[-1] - first.loss[-1]:+.2f} nats"
    ax.set(xscale="log", title=title, ylabel="held-out loss (nats)",
           xlabel="bytes that a rank has sent" + (f"\n({setting})" if setting else ""))
    bytes_axis(ax.xaxis)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


def _family(name):
    """ "PowerSGD 2, no feedback" -> "PowerSGD": names with one result share a tone and a marker."""
    return name.split(",")[0].split(" ")[0]
