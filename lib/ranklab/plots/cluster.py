"""The figures of lab 15 on monitoring: a run and its alarm, step times and the rule's limit."""

import numpy as np

from ranklab.cluster.recordings import CLOCK, DATA, ECC, SCRAPE, SECONDS, SYMBOLS, TEMP
from ranklab.plots.style import FAINT, INK, TONES, bars, figure, styled

ROWS = {SECONDS: "step, s", DATA: "wait for data, s", TEMP: "GPU, C", CLOCK: "SM, MHz",
        ECC: "ECC errors\n(10 scrapes)", SYMBOLS: "link errors\n(10 scrapes)"}


@styled
def recorded(recording, alarm=None, title=""):
    """Draw the metrics of an emulated run over time, sick ranks in colour and the others in grey.

    Vertical lines mark the start of the sickness and the alarm.
    alarm: (scrape, rank) of alarm.play, or (None, None)
    """
    fig, axes = figure(8.6, 6.4, rows=len(ROWS) // 2, cols=2, sharex=True)
    for ax, (name, words) in zip(axes.T.flat, ROWS.items()):
        values = recording.metrics[name]
        if name in (ECC, SYMBOLS):
            values = values - np.vstack([values[:1]] * 10 + [values])[:len(values)]
        minutes = np.arange(len(values)) * SCRAPE / 60
        for rank in range(values.shape[1]):
            is_sick = rank in recording.sick
            ax.plot(minutes, values[:, rank], linewidth=1.3 if is_sick else 0.6,
                    color=TONES[1] if is_sick else FAINT, zorder=2 + is_sick)
        if recording.sick:
            ax.axvline(recording.onset * SCRAPE / 60, color=INK, linewidth=0.8, linestyle=":")
        if alarm and alarm[0] is not None:
            ax.axvline(alarm[0] * SCRAPE / 60, color=TONES[0], linewidth=1.4, linestyle="--")
        ax.set_ylabel(words)
    for ax in axes[-1]:
        ax.set_xlabel("minutes (dotted: it begins)")
    ranks = ", ".join(map(str, recording.sick))
    fig.suptitle(title or f"An emulated run, {recording.kind}: " + (
        f"only rank {ranks} differs" if len(recording.sick) == 1 else
        f"only ranks {recording.sick[0]} to {recording.sick[-1]} differ" if ranks else
        "no rank is sick"))
    return fig


@styled
def step_times(series, factor, fired=()):
    """Draw each rank's seconds until the collective over time, the rule's limit, and its alert.

    series: {labels: [(seconds, value)]} of one run's train_step_seconds
    fired: the result of alerts.alerts; a line marks the first alert
    """
    fig, ax = figure(8, 3.2)
    curves = {dict(labels)["rank"]: points for labels, points in series.items()}
    slow = {labels["rank"] for _, labels in fired}
    moments = {}
    for rank, points in curves.items():
        values = [(t / 60, x) for t, x in points if x is not None]
        for t, x in values:
            moments.setdefault(t, []).append(x)
        ax.plot(*zip(*values), color=TONES[1] if rank in slow else FAINT, zorder=2 + (rank in slow),
                linewidth=1.3 if rank in slow else 0.7, label=f"rank {rank}" * (rank in slow))
    minutes = sorted(moments)
    ax.plot(minutes, [factor * np.median(moments[t]) for t in minutes], color=INK, linewidth=0.9,
            linestyle=":", label=f"{factor} x the median of the moment")
    if fired:
        ax.axvline(fired[0][0] / 60, color=TONES[0], linestyle="--", linewidth=1.4,
                   label="the alert fires")
    ranks = ", ".join(sorted(slow, key=int))
    ax.set(xlabel="minutes", ylabel="seconds until the collective", ylim=(0, None),
           title=f"The alert names rank {ranks} after {fired[0][0] / 60:.0f} minutes" if fired
           else "No rank stays above the limit, and no alert fires")
    ax.legend()
    return fig


@styled
def alarms(scores, title=None):
    """Draw the mean seconds until each alarm as bars, by kind of sickness, and the false alarms.

    scores: {name: Score}
    """
    fig, ax = figure(8, 3.2)
    kinds = list(next(iter(scores.values())).seconds)
    width = 0.8 / len(scores)
    for index, (name, score) in enumerate(scores.items()):
        means = [np.mean(score.seconds[kind]) for kind in kinds]
        bars(ax, np.arange(len(kinds)) + width * index, means, index,
             f"{name}: {len(score.false)} false of {len(score.points)}", width=width)
    ax.set_xticks(np.arange(len(kinds)) + 0.4 - width / 2, kinds)
    if title is None:
        title = "; ".join(f"{name} finds {sum(np.mean(each.seconds[kind]) < 900 for kind in kinds)}"
                          f" of {len(kinds)} kinds" for name, each in scores.items())
    ax.set(ylabel="seconds until the alarm\n(900: none)", title=title)
    ax.grid(axis="x", visible=False)
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=len(scores))
    return fig
