"""The figures of the deck 03_data_parallel.md."""
from itertools import accumulate

import torch

from ranklab.collectives import alpha_beta_time
from ranklab.data_parallel import assign_buckets, scale_learning_rate
from ranklab.ddp import exposed_communication
from ranklab.meter.timeline import Event
from ranklab.models.resnet import ResNet, ResNetConfig
from ranklab.plots import data_parallel as plots
from ranklab.plots.style import INK, bytes_axis, figure, line, styled

MB = 10**6
LINK = 10e-6, 1 / 2e9
with torch.device("meta"):
    WIDE = list(torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)]).parameters())
    RESNET = list(ResNet(ResNetConfig()).parameters())


def _step(parameters, backward, cap, link, ranks=8, overlap=True):
    """A model of one step, not a measurement: gradients come evenly, byte by byte; a ring sends."""
    last_first = parameters[::-1]
    done = dict(zip(last_first, accumulate(p.nbytes for p in last_first)))
    begin, end, speed = backward / 2, backward * 1.5, backward / done[parameters[0]]
    events = [Event("forward", "compute", 0, begin, "main"),
              Event("backward", "compute", begin, end, "main")]
    free = begin if overlap else end
    for bucket in assign_buckets(parameters, cap):
        start = max(free, begin + speed * done[bucket[-1]])
        free = start + alpha_beta_time("ring", sum(p.nbytes for p in bucket), ranks, *link)
        events.append(Event("all-reduce", "communication", start, free, "network"))
    return events + [Event("optimizer", "compute", free, free + 0.004, "main")]


def _timeline(events, title):
    fig = plots.timeline([events], title)
    fig.axes[0].set_xlim(0, 124)
    fig.axes[0].set_yticks((0, 1), ("computes", "sends"))
    for text in fig.axes[0].texts if len(events) > 12 else ():
        text.set_visible(not text.get_text().strip().isdigit())  # too many to number
    return fig, 5.75, 1.95


@styled
def _curves(lines, title, xlabel, ylabel, legend, **looks):
    fig, ax = figure()
    for index, (name, (x, y)) in enumerate(lines.items()):
        line(ax, x, y, index, name, **looks)
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
    ax.legend(loc=legend)
    return fig, ax


def replicas():
    fig = plots.replicas(title="")
    shorter = {"forward, backward": "model", "all-reduce\nmean $= g$": "mean\n$= g$",
               "the same step,\nso the same weights": "so the same\nweights"}
    for text in fig.axes[0].texts:
        text.set_text(shorter.get(text.get_text(), text.get_text()))
        text.set_fontsize(9)
        if not text.get_text() and text.get_position()[1] < 0:  # over the orange box
            text.set_text("all-reduce")
        if text.get_position()[1] > 5:
            text.set_y(5.85)
    fig.axes[0].set_ylim(6.4, -1.1)
    return fig, 6, 2.45


def after():
    return _timeline(_step(WIDE, 0.048, 1, LINK, overlap=False),
                     "One by one, after backward: 24 messages")


def during():
    return _timeline(_step(WIDE, 0.048, 8 * MB, LINK),
                     "Buckets of 8 MB, during backward: 6 messages")


def cap():
    def exposed_ms(cap, ranks):
        return 1000 * exposed_communication(_step(RESNET, 0.067, cap, (10e-6, 8 / 25e9), ranks))

    caps = [10**4 * 10 ** (k / 8) for k in range(33)]
    fig, ax = _curves({f"{R} ranks": (caps, [exposed_ms(cap, R) for cap in caps]) for R in (32, 8)},
                      "ResNet-50, backward 67 ms; 10 us and 25 Gbit/s: a model", "cap of a bucket",
                      "ms exposed", "upper center", marker="")
    ax.axvline(25 * 2**20, color=INK, lw=1, ls=":")
    ax.text(23 * 2**20, 60, "torch's cap", ha="right", va="top", color=INK)
    ax.set(xscale="log", ylim=(0, None))
    bytes_axis(ax.xaxis)
    return fig, 5.75, 2.35


def efficiency():
    def percent(batch, gbit):
        link = 10e-6, 8 / gbit / 1e9
        exposed = exposed_communication(_step(RESNET, batch * 260e-6, 25 * MB, link, 32))
        return 100 * batch * 390e-6 / (batch * 390e-6 + exposed)

    batches = [2**k for k in range(2, 10)]
    fig, ax = _curves({f"{g} Gbit/s": (batches, [percent(b, g) for b in batches])
                       for g in (100, 25, 10)}, "ResNet-50 on 32 ranks, one a node: a model",
                      "images per rank and step", "efficiency in percent", "upper left")
    ax.set_xscale("log", base=2)
    ax.set_xticks(batches, batches)
    ax.set_ylim(0, 105)
    return fig, 5.75, 2.2


def warmup():
    steps = range(0, 1501, 50)
    rates = {"scaled at once": (8192, 0), "with warm-up": (8192, 1000), "as for 256": (256, 0)}
    lines = {name: (steps, [scale_learning_rate(0.1, batch, 256, s, warmup) for s in steps])
             for name, (batch, warmup) in rates.items()}
    fig, _ = _curves(lines, "Batch 8192, where 0.1 was right for 256", "step", "learning rate",
                     "center right", marker="")
    return fig, 5.75, 2.35
