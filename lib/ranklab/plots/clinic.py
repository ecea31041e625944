"""The figures of lab 16: the signs of each disease, who waits for whom, losses after a restart."""

from ranklab.clinic.detectors import first_difference
from ranklab.clinic.symptoms import COLUMNS, PROCESS, SYMPTOMS
from ranklab.plots.boxes import arrow, box, disc
from ranklab.plots.style import FAINT, INK, TONES, clean, figure, line, styled

PALE = "#e8edf2"
STANDING = "#f2c9a4"  # light in grey as well: the call in which a rank waits


@styled
def symptoms(title=None):
    """Draw a row for each of the diseases, in their groups, with a dark square for each sign.

    A sign is a visible difference from the fixed program, on four ranks. An orange diamond marks a
    disease whose only sign is a difference from one process.
    """
    groups = [*SYMPTOMS.items()]
    fig, axes = figure(8.6, 4.6, cols=2)
    for ax, part in zip(axes, (groups[:2], groups[2:])):
        clean(ax)
        row = 0
        for name, diseases in part:
            ax.text(-0.6, row, name, ha="right", va="center", fontweight="bold")
            row += 1
            for disease, signs in diseases.items():
                ax.text(-0.6, row, disease.replace("_", " "), ha="right", va="center", fontsize=9)
                ax.plot((-0.5, 7.5), (row, row), color=FAINT, lw=0.6, zorder=0)
                for column, sign in enumerate(COLUMNS):
                    if signs == {sign} == {PROCESS}:
                        ax.plot(column, row, "D", color=TONES[1], markersize=9)
                    elif sign in signs:
                        ax.plot(column, row, "s", color=TONES[0], markersize=11)
                    else:
                        ax.plot(column, row, ".", color=FAINT, markersize=4)
                row += 1
        for column, sign in enumerate(COLUMNS):
            ax.text(column, -0.6, sign, rotation=60, ha="left", va="center", fontsize=9,
                    rotation_mode="anchor")
        ax.set(xlim=(-5, 9), ylim=(13.5, -5))
    sets = [signs for diseases in SYMPTOMS.values() for signs in diseases.values()]
    wrong = sum(PROCESS in signs for signs in sets)
    silent = sum(signs == {PROCESS} for signs in sets)
    fig.suptitle(f"{wrong} of {len(sets)} diseases differ from one process, and {silent} of these "
                 "show nothing else" if title is None else title)
    return fig


@styled
def waits(calls, title="A circle of waits"):
    """Draw four ranks in a square, an arrow from each to the one it waits for, and their calls.

    Two ranks are in each row and column; the calls are on the right, the last one in colour.
    calls: for each rank, until all hang: [(ranks of the group, name), ...]
    """
    fig, (square, rows) = figure(8.4, 3.5, cols=2, width_ratios=(1, 1.15))
    clean(square)
    clean(rows)
    places = {rank: (2 * (rank % 2), -1.6 * (rank // 2)) for rank in range(4)}
    for rank, rank_calls in enumerate(calls):
        group, call = rank_calls[-1]
        for peer in group:
            count = sum(each[0] == group for each in calls[peer])
            if count < sum(each[0] == group for each in rank_calls):
                _wait(square, places[rank], places[peer], _name(group), call)
    for rank, place in places.items():
        disc(square, *place, rank, 0.25, fontweight="bold")
    square.set(xlim=(-1.1, 3.1), ylim=(-2.2, 0.6), aspect="equal")
    for rank, rank_calls in enumerate(calls):
        rows.text(-0.95, -rank, f"rank {rank}", ha="right", va="center", fontweight="bold")
        for number, (group, call) in enumerate(rank_calls):
            last = number == len(rank_calls) - 1
            box(rows, 1.75 * number, -rank, f"{_name(group)} {_members(group)}:\n{call}",
                STANDING if last else PALE, width=1.6, height=0.86, fontsize=9)
    rows.text(0, 0.65, "done", ha="center")
    rows.text(1.75, 0.65, "waits here", ha="center")
    rows.set(xlim=(-2, 2.7), ylim=(-3.5, 0.9))
    if title:
        fig.suptitle(title)
    return fig


def _wait(ax, start, end, name, call):
    """Draw an arrow between two places, with its words outside the square."""
    (x, y), (to_x, to_y) = start, end
    arrow(ax, (x + 0.16 * (to_x - x), y + 0.2 * (to_y - y)),
          (x + 0.84 * (to_x - x), y + 0.8 * (to_y - y)), lw=2)
    if y == to_y:
        ax.text(1, y + (0.14 if y == 0 else -0.14), f"{name}: {call}", ha="center",
                va="bottom" if y == 0 else "top", fontsize=9)
    else:
        ax.text(x + (-0.14 if x == 0 else 0.14), (y + to_y) / 2, f"{name}:\n{call}",
                ha="right" if x == 0 else "left", va="center", fontsize=9)


def _name(group):
    return "row" if group[1] - group[0] == 1 else "column"


def _members(group):
    return "{" + ", ".join(map(str, group)) + "}"


@styled
def orders(calls, title="The k-th call of each rank"):
    """Draw the calls of each rank in one group, in colour from the first one that differs.

    There is a row for each rank, and a column for each call.
    calls: for each rank: [name, ...]
    """
    first = first_difference(dict(enumerate(calls)))
    longest = max(map(len, calls))
    fig, ax = figure(8.4, 0.62 * len(calls) + 0.6)
    clean(ax)
    for rank, rank_calls in enumerate(calls):
        ax.text(-0.6, -rank, f"rank {rank}", ha="right", va="center", fontweight="bold")
        for number, call in enumerate(rank_calls):
            differs = first is not None and number >= first
            box(ax, number, -rank, call, STANDING if differs else PALE, width=0.94, height=0.86,
                fontsize=9, fontweight="bold" if differs else "normal")
    for number in range(longest):
        ax.text(number, 0.62, f"call {number}", ha="center", fontsize=9)
    ax.set(xlim=(-1.2, longest - 0.4), ylim=(0.4 - len(calls), 1), title=title)
    return fig


@styled
def restarts(runs, stop, first=4, title="After a restart"):
    """Draw a panel for each disease: the loss of each step without a stop, and as found.

    A dotted line marks the stop.
    runs: {disease: (losses of a run without a stop, losses as found)}
    """
    fig, axes = figure(8.2, 3.2, cols=len(runs), sharey=True)
    for ax, (name, (usual, losses)) in zip(axes, runs.items()):
        steps = range(first, len(usual))
        line(ax, steps, usual[first:], 0, "never stopped")
        line(ax, steps, losses[first:], 1, "stopped, and went on")
        ax.axvline(stop - 0.5, color=INK, linewidth=0.8, linestyle=":")
        for a, b in ((usual, losses), (losses, usual)):
            is_above = a[stop] > b[stop]
            ax.annotate(f"{a[stop]:.2f}", (stop, a[stop]), (6, 6) if is_above else (-30, -10),
                        textcoords="offset points")
        ax.set(xlabel="step", title=name)
    axes[0].set_ylabel("loss of the step")
    axes[-1].legend(loc="upper right")
    if title:
        fig.suptitle(title)
    return fig
