"""The figures of lab 02: which data moves where, and how long that takes."""

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Circle, Rectangle
from matplotlib.ticker import LogLocator

from ranklab.plots.boxes import arrow, box, disc
from ranklab.plots.style import (
    FAINT, INK, TONES, bare_grid, bars, bytes_axis, clean, figure, human_bytes, line,
    seconds_axis, styled,
)

SHADES = LinearSegmentedColormap.from_list("ranklab", ["#ffffff", "#8fa9c4", "#12355b"])

# Before and after, for three ranks: one row each, of three slots. A letter is a piece, "+" the sum
# of its column over the ranks. Two match on purpose: reduce-scatter ends where all-gather begins.
DIAGONAL = ["A..", ".B.", "..C"]
OWN = ["ABC", "DEF", "GHI"]
VERBS = {
    "broadcast": (["ABC", "...", "..."], ["ABC", "ABC", "ABC"]),
    "reduce": (OWN, ["+++", "...", "..."]),
    "scatter": (["ABC", "...", "..."], DIAGONAL),
    "gather": (DIAGONAL, ["ABC", "...", "..."]),
    "reduce-scatter": (OWN, ["+..", ".+.", "..+"]),
    "all-gather": (DIAGONAL, ["ABC", "ABC", "ABC"]),
    "all-reduce": (OWN, ["+++", "+++", "+++"]),
    "all-to-all": (OWN, ["ADG", "BEH", "CFI"]),
    "barrier": (["...", "...", "..."], ["...", "...", "..."]),
}


@styled
def nine_verbs():
    """Draw the nine verbs as nine small pictures: what three ranks hold before and after."""
    fig, axes = figure(8.2, 4.6, rows=3, cols=3)
    for ax, (verb, sides) in zip(axes.flat, VERBS.items()):
        clean(ax)
        ax.set_title(verb)
        ax.set(xlim=(-1.6, 8.6), ylim=(2.7, -0.75), aspect="equal")
        for left, rows in zip((0, 5), sides):
            for rank, row in enumerate(rows):
                for slot, text in enumerate(row):
                    _slot(ax, left + slot, rank, text)
        for rank in range(3):
            ax.text(-0.75, rank, f"rank {rank}", ha="right", va="center", fontsize=8)
        words = "wait" if verb == "barrier" else ""
        arrow(ax, (2.7, 1), (4.3, 1))
        ax.text(3.5, 0.7, words, ha="center", va="bottom", fontsize=8)
    return fig


def _slot(ax, x, y, text):
    filled = text != "."
    tone = TONES[0] if text == "+" else "#dbe4ec" if filled else "white"
    box(ax, x, y, text if filled else "", tone, "white" if text == "+" else INK, 1, 1, lw=0.7,
        fontsize=9)


@styled
def steps(messages, ranks, nodes=1, title=None, cols=None):
    """Draw what every rank holds after each step, replayed from its messages.

    `messages`: see collectives.watch. There is one panel per step (`cols` in a row), with a row per
    rank and a column per chunk. The number and the shade of a cell show how many ranks are summed
    in it. A frame marks new data, dashed if it came from another node. In the first panel a circle
    marks what each rank sends first.
    """
    flat = [m for of_rank in messages for m in of_rank]
    n_steps = 1 + max((m.step for m in flat), default=-1)
    panels = n_steps + 1
    cols = cols or (panels if panels <= 5 else min(5, -(-panels // 2)))
    rows = -(-panels // cols)
    side = 0.36 * ranks + 0.5
    fig, axes = figure(cols * side + 0.5, rows * side + 0.7, rows, cols, squeeze=False)
    held = [[frozenset([rank])] * ranks for rank in range(ranks)]
    for step, ax in enumerate(axes.flat):
        if step > n_steps:
            clean(ax)
            continue
        arrivals = [m for m in flat if m.step == step - 1]
        held = _deliver(held, arrivals)
        _panel(ax, held, arrivals, ranks // nodes)
        ax.set_title("start" if step == 0 else f"step {step}")
        for m in flat if step == 0 else ():
            if m.step == 0:
                ax.add_patch(Circle((m.chunk, m.sender), 0.4, fill=False, ec=TONES[1], lw=2))
        if step % cols:
            ax.set_yticklabels([])
    fig.get_layout_engine().set(h_pad=0.1)  # a title must not touch the ticks above it
    note = ("columns are chunks; numbers count the ranks summed in a cell\n"
            "circle: what a rank sends first; frame: just arrived")
    if nodes > 1:
        note += " (dashed: from the other node)"
    fig.supxlabel(note, fontsize=9)
    if title:
        fig.suptitle(title)
    return fig


def _deliver(held, messages):
    """Return the data held after `messages`: partial sums are added, finished sums kept."""
    result = [list(row) for row in held]
    for m in messages:
        cell = held[m.to][m.chunk]
        result[m.to][m.chunk] = m.summed if cell & m.summed else cell | m.summed
    return result


def _panel(ax, held, arrivals, per_node):
    ranks = len(held)
    counts = np.array([[len(cell) for cell in row] for row in held])  # (rank, chunk)
    ax.imshow(counts, cmap=SHADES, vmin=0, vmax=ranks, aspect="equal")
    for rank, row in enumerate(counts):
        for chunk, count in enumerate(row):
            colour = "white" if count > 0.6 * ranks else INK
            ax.text(chunk, rank, count, ha="center", va="center", color=colour, fontsize=9)
    for m in arrivals:
        dashes = "-" if m.sender // per_node == m.to // per_node else (0, (1.6, 1))
        _frame(ax, m.chunk, m.to, dashes)
    bare_grid(ax, range(ranks), [f"rank {rank}" for rank in range(ranks)])
    for edge in range(per_node, ranks, per_node):
        ax.axhline(edge - 0.5, color=INK, lw=2)


def _frame(ax, chunk, rank, dashes):
    corner = (chunk - 0.42, rank - 0.42)
    ax.add_patch(Rectangle(corner, 0.84, 0.84, fill=False, ec=TONES[1], lw=2, ls=dashes))


@styled
def traffic_matrix(bytes_to, title="bytes sent"):
    """Draw the bytes that each rank sent to each other rank: row = sender, column = receiver.

    `bytes_to` has one mapping per rank: peer -> bytes, as in meter's Traffic.bytes_to.
    """
    return traffic_matrices({title: bytes_to})


@styled
def tree(bytes_to, root=0):
    """Draw who sends to whom in a broadcast, with a row for each round.

    A rank's circle is in the round in which it gets the data. Each rank is assumed to send one
    message a round, from the next round on, in the order of its mapping.
    `bytes_to`: as for traffic_matrix
    """
    rounds, edges, order = {root: 0}, [], []
    _branch(bytes_to, root, rounds, edges, order)
    last = max(rounds.values())
    place = {rank: x for x, rank in enumerate(order)}
    fig, ax = figure(max(6, 0.8 * len(order) + 1.4), 0.75 * last + 1.3)
    clean(ax)
    for rank, x in place.items():  # from then on it has the data
        ax.plot((x, x), (rounds[rank], last), color=FAINT, lw=1.5, zorder=0)
        disc(ax, x, rounds[rank], rank, 0.24, fontsize=11, fontweight="bold")
    for sender, receiver in edges:
        start = place[sender], rounds[receiver] - 1
        ax.plot(*start, ".", color=INK, zorder=1)
        arrow(ax, start, (place[receiver], rounds[receiver]), zorder=1, arrowstyle="-|>", lw=1.8,
              color=TONES[1], shrinkB=12)
    for number in range(last + 1):
        ax.text(-0.7, number, f"round {number}" if number else "start", ha="right", va="center")
    busiest = max(range(len(bytes_to)), key=lambda rank: sum(bytes_to[rank].values()))
    ax.set(xlim=(-1.7, len(order) - 0.5), ylim=(last + 0.4, -0.4),
           title=f"After {last} rounds all {len(order)} ranks have the data; rank {busiest} sends "
                 f"{human_bytes(sum(bytes_to[busiest].values()))}")
    return fig


def _branch(bytes_to, rank, rounds, edges, order):
    """Fill in the round of all ranks below `rank`, the edges, and an order without crossings."""
    order.append(rank)
    receivers = [receiver for receiver in bytes_to[rank] if receiver not in rounds]
    for number, receiver in enumerate(receivers, rounds[rank] + 1):
        rounds[receiver] = number
        edges.append((rank, receiver))
    for receiver in reversed(receivers):
        _branch(bytes_to, receiver, rounds, edges, order)


@styled
def traffic_matrices(tables):
    """Draw several traffic matrices in the same shades.

    `tables` is {title: bytes_to of every rank}.
    """
    R = max(len(bytes_to) for bytes_to in tables.values())
    fig, axes = figure((0.6 * R + 1.1) * len(tables), 0.42 * R + 1.4, 1, len(tables), squeeze=False)
    most = max(n for bytes_to in tables.values() for sent in bytes_to for n in (*sent.values(), 1))
    for ax, (title, bytes_to) in zip(axes.flat, tables.items()):
        _matrix(ax, bytes_to, most)
        busiest = max(sum(sent.values()) for sent in bytes_to)
        ax.set_title(f"{title}\nthe busiest rank sends {human_bytes(busiest)}")
    return fig


def _matrix(ax, bytes_to, most):
    R = len(bytes_to)
    table = np.array([[sent.get(peer, 0) for peer in range(R)] for sent in bytes_to])  # (from, to)
    ax.imshow(table, cmap=SHADES, vmin=0, vmax=most, aspect="auto")
    for sender, peer in np.ndindex(R, R):
        n = table[sender, peer]
        colour = "white" if n > 0.6 * most else INK if n else FAINT
        ax.text(peer, sender, human_bytes(n) if n else "-", ha="center", va="center", color=colour,
                fontsize=8.5)
        ax.add_patch(Rectangle((peer - 0.5, sender - 0.5), 1, 1, fill=False, ec=FAINT, lw=0.6))
    bare_grid(ax, range(R), range(R))
    ax.set(xlabel="to rank", ylabel="from rank")


@styled
def busiest_rank(sent):
    """Draw the bytes that each rank sends, as bars.

    `sent` is {algorithm: [bytes of rank 0, of rank 1, ...]}.
    """
    fig, ax = figure(7, 2.8)
    width = 0.8 / len(sent)
    for index, (name, per_rank) in enumerate(sent.items()):
        places = np.arange(len(per_rank)) + (index - (len(sent) - 1) / 2) * width
        bars(ax, places, per_rank, index, name, width=width)
    ax.set_xticks(range(len(per_rank)), [f"rank {r}" for r in range(len(per_rank))])
    busiest = {name: max(per_rank) for name, per_rank in sent.items()}
    most, least = max(busiest, key=busiest.get), min(busiest, key=busiest.get)
    ax.set(ylabel="bytes sent", title=f"The busiest rank: {human_bytes(busiest[most])} by {most}, "
                                      f"{human_bytes(busiest[least])} by {least}")
    bytes_axis(ax.yaxis)
    ax.grid(axis="x", visible=False)
    ax.legend(loc="upper right")
    return fig


@styled
def differing_bits(shares):
    """Draw in which share of the sums each way has other bits than on one rank, as bars.

    `shares` is {way: {ranks: share}}; a share on one rank is left out, because it is 0.
    """
    fig, ax = figure(7.4, 2.9)
    ranks = [R for R in next(iter(shares.values())) if R > 1]
    for index, R in enumerate(ranks):
        heights = [100 * of_ranks[R] for of_ranks in shares.values()]
        places = np.arange(len(shares)) + (index - (len(ranks) - 1) / 2) * 0.8 / len(ranks)
        container = bars(ax, places, heights, index, f"{R} ranks", width=0.8 / len(ranks))
        ax.bar_label(container, [f"{height:.0f}" for height in heights], fontsize=9)
    same = [way for way, of_ranks in shares.items() if not any(of_ranks.values())]
    title = f"The same bits on any number of ranks: {', '.join(same) or 'none of these ways'}"
    ax.set(ylabel="% of the sums differ\nfrom one rank", ylim=(0, 100), title=title)
    ax.set_xticks(range(len(shares)), [way.replace(", then ", ",\nthen ") for way in shares])
    ax.grid(axis="x", visible=False)
    ax.legend(loc="upper right", ncols=len(ranks))
    return fig


@styled
def time_against_size(measured, fits=None, crossover=None, title=None):
    """Draw time against message size: measured points, fitted lines, and the crossover.

    `measured` is {name: (sizes, seconds)}; `fits` is {name: (sizes, seconds)} of the model.
    """
    fig, ax = figure(7.4, 3.4)
    for index, (name, (sizes, seconds)) in enumerate(measured.items()):
        if fits and name in fits:
            line(ax, sizes, seconds, index, name, linestyle="none")
            line(ax, *fits[name], index, None, marker="")
        else:
            line(ax, sizes, seconds, index, name, **({"marker": ""} if len(sizes) > 12 else {}))
    if crossover and np.isfinite(crossover):
        ax.axvline(crossover, color=INK, lw=1, ls=":")
        # Curves rise to the right, so the upper left is free, unless the line is at its edge.
        side = "left" if crossover < 10 * sizes[0] else "right"
        ax.text(crossover, 0.97, f"  crossover {human_bytes(crossover)}  ", ha=side, va="top",
                transform=ax.get_xaxis_transform(), fontsize=9)
    ax.set(xscale="log", yscale="log", xlabel="size of the tensor", ylabel="time")
    bytes_axis(ax.xaxis)
    seconds_axis(ax.yaxis)
    ax.set_title(title or "Few steps win for small tensors, few bytes for large ones")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5),
              title="lines: alpha + n beta" if fits else None, title_fontsize=9)
    return fig


@styled
def slow_link(ratios, seconds, measured=None, setting=None):
    """Draw the time of each algorithm against the slowdown of the link between the nodes.

    `seconds` is {name: [seconds at each ratio]} from the model, `measured` the same from
    emulated links (drawn as points). `setting` describes the message and the links.
    """
    fig, ax = figure(7, 3.4)
    for index, (name, values) in enumerate(seconds.items()):
        line(ax, ratios, values, index, f"{name}: model", marker="")
        if measured and name in measured:
            points = measured[name]
            line(ax, list(points), list(points.values()), index, f"{name}: emulated",
                 linestyle="none")
    ax.set(xscale="log", yscale="log", ylabel="time",
           xlabel="the link between nodes is slower by a factor of"
                  + (f"\n({setting})" if setting else ""), title=_crossing(ratios, seconds))
    ax.set_xticks([2**k for k in range(int(np.log2(max(ratios))) + 1)])
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("")
    ax.minorticks_off()
    seconds_axis(ax.yaxis)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.legend(loc="upper left")
    return fig


def _crossing(ratios, seconds):
    """Return the title of slow_link, by the model of two algorithms."""
    (first, slow), (second, fast) = seconds.items()
    gain = np.subtract(slow, fast)  # the seconds that the second one saves
    places = np.flatnonzero(gain > 1e-9 * np.array(slow))
    if not len(places) or not places[0]:
        return f"By the model, {second if len(places) else first} is never slower"
    index = places[0]
    ratio = np.interp(0, gain[index - 1:index + 1], ratios[index - 1:index + 1])
    return f"From a factor of {ratio:.2g} on, {second} is faster (model)"
