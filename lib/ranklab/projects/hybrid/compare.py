"""`ranklab compare`: one model, one batch, every layout; the losses agree, the costs differ."""

from dataclasses import replace

from tqdm import tqdm

from ranklab.basics.options import picture, positive
from ranklab.hybrid import PARTS, Layout, parse_layout
from ranklab.hybrid.legal import legal
from ranklab.projects.command import Command, refusals, save_figure
from ranklab.projects.hybrid.config import JOBS, LAPTOP, Config, with_experts
from ranklab.projects.hybrid.training import run

TRAIN = {"steps": 2, "log_every": 1, "warmup": 1, "eval_batch": 16, "compare": False}
LEGEND = """dp x tp x pp: data, tensor and pipeline ranks; sp: sequence parallelism; zero: ZeRO-1.
KB: 1000 bytes, at the peak of a step, of the rank that has most. Adam: its two moments.
messages: in a step."""
HELD = ("parameters", "gradients", "optimizer_state")


def every_layout(ranks):
    """Return all layouts of these ranks that fit the model, each with and without options.

    Raises: ValueError if there are none
    """
    job, fitting = JOBS["laptop"], []
    for layout, micro_batch in legal(job, ranks, ranks):
        plain = Layout(layout.dp, layout.tp, layout.pp)
        more = replace(plain, sequence_parallel=plain.tp > 1, zero=int(plain.dp > 1))
        if micro_batch == job.micro_batch and layout in (plain, more):
            fitting.append(layout)
    if not fitting:
        raise ValueError(f"no layout of {ranks} ranks fits the GPT and its batch")
    return fitting


def compare(layouts, experts=0, progress=True, parts=None):
    """Train on one process and then in each layout; return a row for each.

    A row: {name, loss, held, sent, messages, seconds}. held, sent and messages are maxima over
    ranks.
    experts: number in each block; 0: an MLP
    parts: a learner's functions for hybrid.parts.PARTS, {name: function}
    """
    rows = []
    for layout in tqdm([Layout(), *layouts], desc="layouts", disable=not progress):
        results = run(layout=layout, experts=experts, parts=parts, timeout=300, **TRAIN)
        ranks, config, n_ctx = results["ranks"], results["config"], results["shape"].n_ctx
        rows.append({
            "name": " ".join([f"{layout.dp} x {layout.tp} x {layout.pp}", *layout.words()]),
            "loss": ranks[0]["loss"], "messages": max(rank["messages"] for rank in ranks),
            "held": {name: max(getattr(rank["held"], name) for rank in ranks) for name in HELD},
            "sent": {axis: max(rank["sent"][axis] for rank in ranks) for axis in ranks[0]["sent"]},
            "seconds": config.batch * n_ctx / ranks[0]["history"].speed[-1]})
    return rows


def table(rows):
    """Return `rows` as text."""
    axes = sorted(set().union(*(row["sent"] for row in rows)))
    lines = [f"{'':28}{'KB on a rank':>27}{'KB sent in a step along':>27}",
             f"{'dp x tp x pp':22}{'loss':>6}" + "".join(f"{name:>9}" for name in (
                 "weights", "grads", "Adam", *axes, "messages")) + "    step"]
    for row in rows:
        nbytes = [*row["held"].values(), *(row["sent"].get(axis, 0) for axis in axes)]
        cells = "".join(f"{n / 1e3:9,.0f}" for n in nbytes) + f"{row['messages']:9,}"
        lines.append(f"{row['name']:22}{row['loss']:.4f}{cells}{1e3 * row['seconds']:5.0f} ms")
    most = max(abs(row["loss"] - rows[0]["loss"]) for row in rows)
    return "\n".join([*lines, LEGEND, f"The losses differ by {most:.0e} at most. Ranks share the "
                      "cores of this machine, so\nstep times say nothing of GPUs."])


@refusals("ranklab compare")
def main(arguments, passed_answers):
    """Run `ranklab compare`: compare the layouts, and print a table.

    passed_answers: (names) -> {name: function} of the learner
    """
    parser = Command("ranklab compare", __doc__)
    parser.add_argument("--ranks", type=positive, default=4, help="in each layout")
    parser.add_argument("--layouts", nargs="+", metavar="LAYOUT",
                        help="such as 2x2x2,zero,sp: dp x tp x pp ranks; sp: sequence parallelism; "
                             "zero, full: ZeRO-1, ZeRO-3; cp=2, ep=2: context, expert ranks. By "
                             "default every layout of --ranks")
    parser.add_argument("--experts", type=positive, default=0, metavar="E",
                        help="in each block, instead of an MLP")
    parser.add_argument("--own", action="store_true",
                        help="by your functions, where your answers have passed and pass again")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw it, too: x.svg or x.png")
    options = parser.parse_args(arguments)
    layouts = [*map(parse_layout, options.layouts or ())] or every_layout(options.ranks)
    for layout in layouts:
        Config().refuse_what_does_not_fit(with_experts(LAPTOP, options.experts), layout)
    rows = compare(layouts, options.experts, parts=passed_answers(PARTS) if options.own else None)
    if options.plot:
        from ranklab.plots import hybrid  # here: matplotlib takes half a second

        save_figure(options.plot, lambda: hybrid.compared(rows))
    print(table(rows))
