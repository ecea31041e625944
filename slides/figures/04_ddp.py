"""The figures of the deck 04_ddp.md. All but the last two are models: every number is made here."""
import torch

from ranklab import launch
from ranklab.collectives import alpha_beta_time, best_sent_bytes
from ranklab.ddp import (
    diagnose, exposed_communication, power_sgd, scaling_efficiency, top_k_compress,
)
from ranklab.ddp.quality import Progress, Quality
from ranklab.meter.timeline import Event
from ranklab.models.resnet import ResNet, ResNetConfig
from ranklab.plots import ddp as plots
from ranklab.plots.style import INK, bytes_axis, figure, line, styled
from ranklab.projects.ddp.strong_and_weak import Measured

N = 25.6e6  # parameters of a ResNet-50
SIZE = 5.75, 2.4  # inches of every figure


def _compute(start, end, name="compute"):
    return Event(name, "compute", start / 1000, end / 1000, "stream 7")


def _travel(start, end):
    return Event("all-reduce", "communication", start / 1000, end / 1000, "stream 20")


def _job(loads, computes, transfer, steps=2, buckets=4):
    """Two ranks load, compute; a bucket leaves when it is full, arrives when all have sent it."""
    lanes, now = [[] for _ in loads], 0
    for _ in range(steps):
        done = now
        for lane, load, ms in zip(lanes, loads, computes):
            lane += [Event("load", "loader", now / 1000, (now + load) / 1000, "main"),
                     _compute(now + load, now + load + ms)]
        for bucket in range(1, buckets + 1):
            full = [now + load + ms * (buckets + 2 * bucket) / (3 * buckets)
                    for load, ms in zip(loads, computes)]
            begin, done = [max(each, done) for each in full], max(*full, done) + transfer
            for lane, start in zip(lanes, begin):
                lane.append(_travel(start, done))
        now = done + 4
        for lane in lanes:
            lane.append(_compute(done, now, "optimizer"))
    return lanes


JOBS = {"job A": _job((3, 3), (60, 60), 32), "job B": _job((3, 3), (90, 90), 8),
        "job C": _job((3, 3), (50, 130), 8), "job D": _job((70, 66), (60, 60), 8)}


def step():
    fig = plots.production_step()
    fig.axes[0].set_title("")
    return fig, *SIZE


def _step_seconds(images, ranks, buckets=4):
    ms = 0.39 * images  # a third of it forward; then buckets become full one after the other
    part = alpha_beta_time("ring", 4 * N / buckets, ranks, 10e-6, 8 / 100e9) if ranks > 1 else 0
    done, events = 0, [_compute(0, ms)]
    for bucket in range(1, buckets + 1):
        start = max(done, ms * (buckets + 2 * bucket) / (3 * buckets))
        done = start + 1000 * part
        events.append(_travel(start, done))
    return ms / 1000 + exposed_communication(events)


def _scaling_rows(kind, batch=128, ranks=(1, 2, 4, 8, 16, 32)):
    images = {R: batch // R if kind == "strong" else batch for R in ranks}
    seconds = {R: _step_seconds(images[R], R) for R in ranks}
    efficiency = scaling_efficiency(seconds, kind)
    return [Measured(kind, R, images[R], seconds[R], efficiency[R]) for R in ranks]


def scaling():
    return plots.scaling(_scaling_rows("strong") + _scaling_rows("weak"),
                         "ResNet-50: a model"), *SIZE


def exposed():
    steps = {"float32: a step of 380 ms": [[_compute(0, 300), _travel(220, 380)]],
             "float16: 300 ms": [[_compute(0, 300), _travel(220, 300)]]}
    fig = plots.situations(steps, cols=1)
    for ax in fig.axes:
        ax.set_xlim(0, 390)
    return fig, *SIZE


def jobs():
    return plots.situations(JOBS), *SIZE


def verdicts():
    found = {name: diagnose(of_ranks) for name, of_ranks in JOBS.items()}
    said = {name: f"{verdict}, {shares[verdict]:.0%}" if verdict in shares else verdict
            for name, (verdict, shares) in found.items()}
    return plots.situations(JOBS, said), *SIZE


@styled
def _curves(lines, title, xlabel, ylabel, beside=False, **looks):
    fig, ax = figure()
    for index, (name, (x, y)) in enumerate(lines.items()):
        line(ax, x, y, index, name, **looks)
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
    ax.legend(**({"loc": "center left", "bbox_to_anchor": (1, 0.5)} if beside else {}))
    return fig, ax


def _sent_so_far(feedback, entry=2, steps=50):
    gradient, error, total = torch.tensor([1.0, 0.43, 0.21, 0.11]), torch.zeros(4), torch.zeros(4)
    seen = [0.0]
    for _ in range(steps):
        values, indices, rest = top_k_compress(gradient, error, 1)
        error = rest if feedback else error
        total[indices] += values
        seen.append(round(total[entry].item(), 3))
    return range(steps + 1), seen


def feedback():
    fig, ax = _curves({"in the gradients": (range(51), [round(0.21 * t, 3) for t in range(51)]),
                       "with error feedback": _sent_so_far(True), "without": _sent_so_far(False)},
                      "One entry: 0.21 in every step; one of four travels", "step", "sent so far",
                      marker="")
    ax.lines[1].set_drawstyle("steps-post")
    return fig, *SIZE


def _power_sgd_numbers(model, rank=4, shrink=2):
    shapes = [(len(p), p[0].numel()) if p.dim() > 1 else (p.numel(), 1) for p in model.parameters()]
    return sum(min(rank * (n + m), n * m) if shrink * rank * (n + m) < n * m else n * m
               for n, m in shapes)


def bytes():
    with torch.device("meta"):
        resnet = ResNet(ResNetConfig())
    worlds = [2**k for k in range(1, 11)]
    reduced = {"float32": 4 * N, "float16": 2 * N, "PowerSGD 4": 4 * _power_sgd_numbers(resnet)}
    sent = {name: (worlds, [best_sent_bytes("all_reduce", size, R) for R in worlds])
            for name, size in reduced.items()}
    sent |= {f"top-k {share:.1%}": (worlds, [best_sent_bytes("all_gather", R * share * N * 8, R)
                                             for R in worlds]) for share in (0.01, 0.001)}
    fig, ax = _curves(sent, "ResNet-50: what a rank sends in a step", "ranks", "bytes", beside=True,
                      markersize=4)
    ax.set(yscale="log")
    ax.set_xscale("log", base=2)
    ax.set_xticks(worlds[::2], worlds[::2])
    bytes_axis(ax.yaxis)
    return fig, *SIZE


def _approach(warm, steps=8, rank=2):
    # Cosines are orthogonal, so the k-th singular value is 0.7**k times the first.
    def waves(n):
        return torch.cos(torch.pi * (torch.arange(n)[:, None] + 0.5) * torch.arange(1, 9) / n) \
            * (2 / n) ** 0.5

    matrix = waves(32) * 0.7 ** torch.arange(8) @ waves(16).T
    first, errors = torch.eye(16)[:, :rank], []
    q = first
    for _ in range(steps):
        near, q, _ = power_sgd(matrix, q if warm else first, torch.zeros_like(matrix))
        errors.append(round(((near - matrix).norm() / matrix.norm()).item(), 3))
    best = torch.linalg.svdvals(matrix)[rank:].norm() / matrix.norm()
    return range(1, steps + 1), errors, round(best.item(), 3)


def warm():
    (x, kept, best), (_, cold, _) = (launch(_approach, warm, ranks=1)[0] for warm in (True, False))
    fig, ax = _curves({"the last step's Q": (x, kept), "the same Q each time": (x, cold)},
                      "One fixed matrix, 32 x 16, by rank 2", "step", "error")
    ax.axhline(best, color=INK, lw=1, ls=":")
    ax.text(0.7, best, "best possible", va="bottom", fontsize=9)
    return fig, *SIZE


def loss():
    """Measured: ddp.quality.compare_hooks(..., seed=0, 1, 2), the mean of the three."""
    measured = (("float32", 82304, 2.967), ("fp16", 41152, 2.961),
                ("top-k 1%", 1632, 2.972), ("top-k 1%, no feedback", 1632, 3.107),
                ("PowerSGD 1", 3840, 3.047), ("PowerSGD 1, no feedback", 3840, 3.122),
                ("PowerSGD 4", 14208, 2.978), ("PowerSGD 4, no feedback", 14208, 2.993))
    fig = plots.loss_against_bytes([Quality(*row) for row in measured],
                                   "A GPT on real text, 2 ranks, 50 steps, three seeds")
    fig.axes[0].set(ylabel="held-out loss (nats)", ylim=(2.92, 3.18))
    return fig, *SIZE


def diloco():
    """Measured: ddp.quality.compare_trainers(..., seed=0, 1, 2), the mean of the three."""
    steps, nbytes = range(16, 97, 16), 82304  # of an all-reduce of all parameters
    measured = (("DDP", [nbytes * step for step in steps],
                 (3.801, 3.166, 2.940, 2.866, 2.803, 2.741)),
                ("DiLoCo, H = 4", [nbytes * step // 4 for step in steps],
                 (3.298, 3.422, 3.231, 3.242, 3.155, 3.116)),
                ("DiLoCo, H = 16", [nbytes * step // 16 for step in steps],
                 (3.557, 3.146, 3.013, 2.953, 2.852, 2.808)),
                ("averages, H = 16", [nbytes * step // 16 for step in steps],
                 (3.824, 3.186, 2.961, 2.880, 2.827, 2.789)))
    runs = [Progress(name, [*steps], sent, loss) for name, sent, loss in measured]
    fig = plots.loss_by_bytes(runs, "a GPT of one layer, 2 ranks, 96 steps, three seeds")
    return fig, *SIZE
