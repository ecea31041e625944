"""`ranklab compare`: one model, one batch, every layout; the losses agree, the costs differ."""

import itertools
import json
import statistics
import time
from collections import Counter
from dataclasses import asdict

from tqdm import tqdm

from ranklab import data
from ranklab.engine import device, launch
from ranklab.hybrid import Hybrid, Job, Layout, parse_layout
from ranklab.hybrid.choose import refuse_misfits
from ranklab.meter import Traffic, memory_of
from ranklab.models.gpt import GPTConfig
from ranklab.options import number, picture
from ranklab.projects.command import MOST_RANKS, Command, refusals, save_figure
from ranklab.projects.hybrid.training import new_model
from ranklab.text_trainer import TextTrainer, TrainConfig

SHAPE = {"n_ctx": 32, "n_embd": 64, "n_head": 8, "n_layer": 8}
TRAIN = TrainConfig(steps=3, batch=16, micro_batch=2, log_every=1, warmup=1, eval_batch=16)
AXES = ("data", "tensor", "pipeline")
HELD = ("parameters", "gradients", "optimizer_state")


def every_layout(ranks):
    """All dp x tp x pp = ranks that fit the model, and what each axis has besides."""
    sizes = [each for each in itertools.product(range(1, ranks + 1), repeat=3)
             if each[0] * each[1] * each[2] == ranks and SHAPE["n_head"] % each[1] == 0
             and TRAIN.batch % each[0] == 0 and each[2] <= SHAPE["n_layer"]]
    found = [layout for dp, tp, pp in sizes for layout in (
        Layout(dp, tp, pp), Layout(dp, tp, pp, sequence_parallel=tp > 1, zero=int(dp > 1)))]
    if not found:
        raise ValueError(f"no layout of {ranks} ranks fits a GPT of {SHAPE['n_layer']} layers and "
                         f"{SHAPE['n_head']} heads, and a batch of {TRAIN.batch}")
    return [*dict.fromkeys(found)]


def compare(layouts, progress=True):
    """[{layout, loss, held, sent, messages, seconds}], one process first; largest over ranks."""
    text = data.python_text()
    rows = []
    for layout in tqdm([Layout(), *layouts], desc="layouts", disable=not progress):
        of_ranks = launch(_measure, text, layout, ranks=layout.ranks, timeout=300)
        most = {name: {key: max(rank[name][key] for rank in of_ranks) for key in of_ranks[0][name]}
                for name in ("held", "sent", "messages")}
        rows.append({"layout": asdict(layout), "name": str(layout), "loss": of_ranks[0]["loss"],
                     **most, "seconds": max(rank["seconds"] for rank in of_ranks)})
    return rows


def new_trainer(text, parallel):
    """Of the same GPT, whatever the layout."""
    return TextTrainer(new_model(shape_of(text)), text, TRAIN, device(), progress=False,
                       parallel=parallel)


def shape_of(text):
    return GPTConfig(vocab_size=text.vocab_size, **SHAPE)


def _measure(text, layout):
    trainer, seconds, held = new_trainer(text, Hybrid(layout.new_mesh(), layout)), [], []
    for _ in range(TRAIN.steps - 1):
        started = time.perf_counter()
        trainer.step()
        seconds.append(time.perf_counter() - started)
    trainer.optimizer.register_step_pre_hook(
        lambda *_: held.append(memory_of(trainer.model, trainer.optimizer)))
    with Traffic() as traffic:
        share = trainer.step()
    mesh = trainer.parallel.mesh
    sent, messages = traffic.by_axis(mesh), Counter()
    for op in traffic.ops:
        messages[" x ".join(mesh.axes_of(op.group))] += op.messages
    return {"loss": trainer.parallel.total(share).item(), "seconds": statistics.median(seconds),
            "held": {name: getattr(held[0], name) for name in HELD},
            "sent": {axis: sent[axis] for axis in AXES},
            "messages": {axis: messages[axis] for axis in AXES}}


def table(rows):
    """`rows` as text."""
    columns = [f"{'dp x tp x pp':26}  loss"]
    columns += [f"{name:>10}" for name in ("weights", "gradients", "Adam")]
    columns += [f"{axis:>9}" for axis in AXES]
    lines = [f"{'':33}{'KB on a rank':>29}{'KB sent in a step along':>28}",
             "".join(columns) + "     step"]
    for row in rows:
        layout = Layout(**row["layout"])
        name = " ".join([f"{layout.dp} x {layout.tp} x {layout.pp}", *layout.words()])
        cells = [f"{row['held'][key] / 1e3:10,.0f}" for key in HELD]
        cells += [f"{row['sent'][axis] / 1e3:9,.0f}" for axis in AXES]
        lines.append(f"{name:26} {row['loss']:.4f}{''.join(cells)} {1e3 * row['seconds']:5.0f} ms")
    most = max(abs(row["loss"] - rows[0]["loss"]) for row in rows)
    return "\n".join([*lines, f"The losses differ by {most:.0e} at most. Ranks share the cores of "
                      "this machine, so\nits step times say nothing of GPUs."])


def draw(rows):
    from ranklab.plots import hybrid  # here: matplotlib takes half a second

    return hybrid.compared(rows)


@refusals("ranklab compare")
def main(arguments):
    """`ranklab compare` has run; returns its exit code."""
    parser = Command("ranklab compare", __doc__)
    parser.add_argument("--ranks", type=number(least=1, most=MOST_RANKS), default=4,
                        help="of each layout")
    parser.add_argument("--layouts", nargs="+", metavar="2x2x2,zero,sp",
                        help="dp x tp x pp, and what else; all of --ranks by default")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw it, too: x.svg or x.png")
    options = parser.parse_args(arguments)
    layouts = [*map(parse_layout, options.layouts or ())] or every_layout(options.ranks)
    for layout in layouts:
        refuse_misfits(layout, Job(GPTConfig(**SHAPE), TRAIN.batch, TRAIN.micro_batch, "fp32"),
                       layout.ranks)
    rows = compare(layouts)
    save_figure(options.plot, lambda: draw(rows))
    print(json.dumps(rows, indent=1) if options.json else table(rows))
